// Package setuptest holds the tests of vfio-setup.sh: the script runs under every POSIX shell that
// is here, against folders that play a machine (HELIOS_SYSROOT), and each run is judged by its exit
// code, its words and what it changed in the folder.
package setuptest
