package main

import (
	"archive/zip"
	"os"
	"testing"

	"github.com/stretchr/testify/require"
)

// writeJar makes a jar whose manifest wants libs/a.jar.
func writeJar(t *testing.T, file string) {
	f, err := os.Create(file)
	require.NoError(t, err)
	z := zip.NewWriter(f)
	w, err := z.Create("META-INF/MANIFEST.MF")
	require.NoError(t, err)
	_, err = w.Write([]byte("Manifest-Version: 1.0\r\nClass-Path: libs/\r\n a.jar\r\n"))
	require.NoError(t, err)
	require.NoError(t, z.Close())
	require.NoError(t, f.Close())
}
