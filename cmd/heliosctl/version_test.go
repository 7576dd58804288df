package main

import (
	"path/filepath"
	"regexp"
	"runtime"
	"runtime/debug"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestVersionLicenses(t *testing.T) {
	text := ok(t, "version", "--licenses")
	for _, want := range []string{
		"==== Go's standard library and runtime, " + runtime.Version() + ": LICENSE",
		"==== go.yaml.in/yaml/v3 ", ": NOTICE\n\nCopyright 2011-2016 Canonical Ltd.\n",
		"Permission is hereby granted, free of charge",
		"Redistribution and use in source and binary forms", "Apache License",
	} {
		require.Contains(t, text, want)
	}
	// The module list of a test binary has what only tests use as well.
	info, there := debug.ReadBuildInfo()
	require.True(t, there)
	linked := map[string]string{}
	for _, d := range info.Deps {
		linked[d.Path] = d.Version
	}
	all := lines(t, ok(t, "version", "--licenses", "--json"))
	require.Greater(t, len(all), 10)
	for _, m := range all[1:] {
		require.Equal(t, "license", m["event"])
		if v, there := linked[m["path"].(string)]; there {
			require.Equal(t, v, m["version"], m["path"])
		}
		require.NotEmpty(t, m["files"])
	}
	require.Contains(t, linked, "github.com/urfave/cli/v2")
}

// The version stands in one file; the change log has a heading of it.
func TestChangelogHasTheVersion(t *testing.T) {
	text := readFile(t, filepath.Join(repo, "python/helios/_version.py"))
	m := regexp.MustCompile(`(?m)^__version__ = "(.*)"$`).FindStringSubmatch(text)
	require.NotNil(t, m)
	log := readFile(t, filepath.Join(repo, "CHANGELOG.md"))
	require.Contains(t, log, "\n## "+m[1])
	require.Equal(t, strings.Index(log, "\n## "), strings.Index(log, "\n## "+m[1]), "the first heading")
}
