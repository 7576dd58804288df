package helios

import _ "embed"

// VFIOSetup is vfio-setup.sh, which prepares a machine for SSDs by VFIO: "heliosctl vfio-setup"
// runs it.
//
//go:embed vfio-setup.sh
var VFIOSetup string
