package main

import (
	"fmt"
	"strings"
)

// resultCases are files of results, which come from anybody.
func resultCases() (all []hostileCase) {
	begin := func(verb, args string) string {
		return fmt.Sprintf(`{"event":"begin","schema":2,"verb":%q,"folder":".","command":["heliosctl"],`+
			`"arguments":[%s]}`+"\n"+`{"event":"end","whole":true}`+"\n", verb, args)
	}
	first := begin("train", `"train","--","g"`)
	contents := map[string]any{
		"a device": linkTo("/dev/zero"), "memory": linkTo("/proc/self/mem"), "a pipe": special(fifo),
		"a folder": special(folder), "a line of 4 GB": sparse([]byte(first), 4<<30),
		"a deep line":          first + `{"event":"x","v":` + strings.Repeat("[", 8<<20) + "\n",
		"a line of 8 M values": first + `{"event":"x","v":[` + strings.Repeat("1,", 8<<20) + "1]}\n",
		"many lines":           first + strings.Repeat(`{"event":"e","ok":true}`+"\n", 4<<20),
		"NaN":                  first + `{"event":"e","loss":NaN}` + "\n", "gzip": "\x1f\x8b\x08\x00",
	}
	for _, n := range sorted(contents) {
		all = append(all, hostileCase{name: "rerun: " + n, args: "rerun r.jsonl", names: "r.jsonl",
			files: map[string]any{"r.jsonl": contents[n]}})
		if n != "many lines" && n != "NaN" {
			all = append(all, hostileCase{name: "report: " + n, args: "report r.jsonl --out out",
				names: "r.jsonl", files: map[string]any{"r.jsonl": contents[n]}})
		}
	}
	for _, c := range []struct{ verb, flag string }{
		{"train", "-blas=./x.so"}, {"train", "--blas=./x.so"}, {"train", "--hotness=secret"}, {"train", "--partition=secret"},
		{"plan", "--degrees=secret"}, {"plan", "--calibrate=secret"}, {"compare", "--variants=a=--blas ./x.so"},
	} {
		args := `"` + strings.ReplaceAll(c.verb, " ", `","`) + `",` + fmt.Sprintf("%q", c.flag) + `,"--"`
		name, _, _ := strings.Cut(strings.TrimLeft(c.flag, "-"), "=")
		all = append(all, hostileCase{name: "rerun: " + c.verb + " " + c.flag, args: "rerun r.jsonl",
			names: "--" + name, secret: secret, files: map[string]any{"r.jsonl": begin(c.verb, args),
				"secret": secret, "x.so": "\x7fELF"}})
	}
	return all
}

// profileCases are machines and SSDs that cannot be.
func profileCases() (all []hostileCase) {
	for _, f := range []string{"gpu: {sms: {value: 1e308, source: s}}",
		"gpu: {launch_ns: {value: 1e308, source: s}}", "gpu: {hbm_gbs: {value: .nan, source: s}}",
		"gpu: {io: {ring: {ns: .inf, source: s}}}", "cpu: {cores: {value: 1e19, source: s}}",
		"pcie: {gpu: {raw_gbs: {value: 5e-324, source: s}}}", "ssds: {count: {value: 1e18, source: s}}"} {
		field, _, _ := strings.Cut(f[strings.Index(f, "{")+1:], ":")
		all = append(all, hostileCase{name: "hardware: " + f, names: field,
			args:  "plan ig --hardware ./p.yaml --batches 1",
			files: map[string]any{"p.yaml": "base: a100-p5510x12\nname: x\n" + f + "\n"}})
	}
	bomb := "a0: &a0 [x,x,x,x,x,x,x,x,x]\n"
	for i := 1; i < 12; i++ {
		bomb += fmt.Sprintf("a%d: &a%d [%s]\n", i, i, strings.TrimSuffix(strings.Repeat(fmt.Sprintf("*a%d,",
			i-1), 9), ","))
	}
	return append(all, hostileCase{name: "hardware: aliases of aliases", names: "p.yaml",
		args: "plan ig --hardware ./p.yaml", files: map[string]any{"p.yaml": bomb}},
		hostileCase{name: "SSD model: latency 1e308", names: "latency",
			args:  "bench io --clock virtual --hardware a100-optane --ssd-model m.yaml",
			files: map[string]any{"m.yaml": "name: x\nread: {latency: {quantiles: [{q: 1, us: 1e308}], source: s}}\n"}})
}
