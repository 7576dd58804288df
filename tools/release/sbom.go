package main

import (
	"crypto/sha256"
	"debug/buildinfo"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"time"

	"helios/internal/licenses"
)

// bom is the part of CycloneDX 1.6 that a Go program has to say.
type bom struct {
	Format     string      `json:"bomFormat"`
	Spec       string      `json:"specVersion"`
	Version    int         `json:"version"`
	Metadata   metadata    `json:"metadata"`
	Components []component `json:"components"`
}

type metadata struct {
	Timestamp string    `json:"timestamp"`
	Component component `json:"component"`
}

type component struct {
	Type     string    `json:"type"`
	Name     string    `json:"name"`
	Version  string    `json:"version"`
	PURL     string    `json:"purl,omitempty"`
	Hashes   []hash    `json:"hashes,omitempty"`
	Licenses []license `json:"licenses,omitempty"`
}

type hash struct {
	Algorithm string `json:"alg"`
	Content   string `json:"content"`
}

type license struct {
	License licenseText `json:"license"`
}

type licenseText struct {
	ID   string   `json:"id,omitempty"`
	Name string   `json:"name,omitempty"`
	Text *content `json:"text,omitempty"`
}

type content struct {
	Content string `json:"content"`
}

// writeSBOM lists the modules in the program and their licences.
func writeSBOM(w io.Writer, r *release) error {
	path := filepath.Join(r.root, "usr/bin/heliosctl")
	info, err := buildinfo.ReadFile(path)
	if err != nil {
		return err
	}
	program, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	all, err := licenses.All()
	if err != nil {
		return err
	}
	texts := map[string][]license{}
	for _, m := range all {
		for _, f := range m.Files {
			texts[m.Path] = append(texts[m.Path],
				license{licenseText{Name: f.Name, Text: &content{f.Text}}})
		}
	}
	b := bom{Format: "CycloneDX", Spec: "1.6", Version: 1, Metadata: metadata{
		r.made.Format(time.RFC3339), component{Type: "application", Name: "heliosctl",
			Version: r.version, Hashes: []hash{{"SHA-256", fmt.Sprintf("%x", sha256.Sum256(program))}},
			Licenses: []license{{licenseText{ID: spdx}}}}}}
	add := func(path, version string) error {
		if texts[path] == nil {
			return fmt.Errorf("no licence of %s is known; run \"make generate\"", path)
		}
		b.Components = append(b.Components, component{Type: "library", Name: path, Version: version,
			PURL: "pkg:golang/" + path + "@" + version, Licenses: texts[path]})
		return nil
	}
	if err := add(licenses.Std, strings.TrimPrefix(info.GoVersion, "go")); err != nil {
		return err
	}
	for _, d := range info.Deps {
		if err := add(d.Path, d.Version); err != nil {
			return err
		}
	}
	e := json.NewEncoder(w)
	e.SetIndent("", " ")
	return e.Encode(b)
}
