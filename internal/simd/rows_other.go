//go:build !amd64

package simd

// No level above Generic is to be had here, so none of these is called.

func sumColumnsAVX2(*byte)      {}
func sumColumnsAVX512(*byte)    {}
func adamAVX2(*byte)            {}
func adamAVX512(*byte)          {}
func copyRowsAVX2(*byte)        {}
func copyRowsAVX512(*byte)      {}
func prefetchParts(*byte)       {}
func sumListsAVX2(*byte) bool   { return false }
func sumListsAVX512(*byte) bool { return false }
func readRows(*byte) bool       { return false }
func storeFence()               {}
