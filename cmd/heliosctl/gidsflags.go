package main

import (
	"slices"
	"strconv"
	"strings"

	"github.com/urfave/cli/v2"

	"helios/internal/errs"
)

// gidsFlag is a flag of GIDS's training scripts (evaluation/homogenous_train.py) and what it is
// here. docs/reference/gids-flags.md lists them for people.
type gidsFlag struct {
	name  string
	value bool // takes one
	// to are our flags for it; conv, where given, makes their value.
	to   string
	conv func(v string) (string, error)
	// needs is a flag of theirs without which this one does nothing there.
	needs string
	// no says why there is none of ours.
	no string
}

func gidsShare(v string) (string, error) {
	f, err := strconv.ParseFloat(v, 64)
	if err != nil || !(f >= 0 && f <= 1) {
		return "", errs.New(errs.Usage, "%q is not a share between 0 and 1", v)
	}
	return strconv.FormatFloat(100*f, 'g', 10, 64) + "%", nil
}

func gidsMiB(v string) (string, error) {
	n, err := strconv.ParseInt(v, 10, 32)
	if err != nil || n < 0 {
		return "", errs.New(errs.Usage, "%q is not a number of MiB", v)
	}
	return strconv.FormatInt(n, 10) + "MiB", nil
}

// gidsFlags are looked up where a verb has no flag of that name. A flag that switches something on
// has its size from a second one (--window_buffer and --wb_size): the sizes alone do nothing there,
// so they are refused here.
var gidsFlags = []gidsFlag{
	{name: "path", value: true, to: "dataset"},
	{name: "model_type", value: true, to: "model"},
	{name: "fan_out", value: true, to: "fanout"},
	{name: "batch_size", value: true, to: "batch-size"},
	{name: "hidden_channels", value: true, to: "hidden"},
	{name: "learning_rate", value: true, to: "lr"},
	{name: "decay", value: true, to: "weight-decay"},
	{name: "GIDS", to: "mode", conv: func(string) (string, error) { return "gids", nil }},
	{name: "cache_size", value: true, to: "gpu-cache", conv: gidsMiB},
	{name: "page_size", value: true, to: "cache-line"},
	{name: "window_buffer", to: "window", conv: func(string) (string, error) { return "6", nil }},
	{name: "wb_size", value: true, to: "window", needs: "window_buffer"},
	{name: "accumulator", to: "accumulate",
		conv: func(string) (string, error) { return "0.95", nil }},
	{name: "peak_percent", value: true, to: "accumulate", needs: "accumulator"},
	{name: "cpu_buffer", to: "cpu-cache", conv: func(string) (string, error) { return "20%", nil }},
	{name: "cpu_buffer_percent", value: true, to: "cpu-cache", conv: gidsShare,
		needs: "cpu_buffer"},
	{name: "pin_file", value: true, to: "hotness", needs: "cpu_buffer"},

	{name: "num_ssd", value: true,
		no: "the bound SSDs are used: see bind-ssds, or --ssds to choose among them"},
	{name: "bw", value: true, no: "the accumulator measures the SSDs itself when it starts"},
	{name: "l_ssd", value: true, no: "the accumulator measures the SSDs itself when it starts"},
	{name: "l_system", value: true,
		no: "the accumulator measures the system itself when it starts"},
	{name: "num_layers", value: true, no: "a model has a layer for each number of --fanout"},
	{name: "offset", value: true, no: "the SSDs' superblocks say where the rows are"},
	{name: "num_ele", value: true, no: "the SSDs' superblocks say how many rows there are"},
	{name: "cache_dim", value: true, no: "the dataset says how long a row is"},
	{name: "emb_size", value: true, no: "the dataset says how long a row is"},
	{name: "num_classes", value: true, no: "the dataset says how many classes there are"},
	{name: "uva", value: true, no: "a GPU reads the topology in CPU memory by itself"},
	{name: "uva_graph", value: true, no: "a GPU reads the topology in CPU memory by itself"},
	{name: "num_workers", value: true, no: "use --workers for the threads of the host device"},
	{name: "in_memory", value: true, no: "use --mode inmem to keep every row in memory"},
}

// findGIDS is the flag of theirs with a name, where the verb is one that trains or infers.
func findGIDS(flags []cli.Flag, name string) *gidsFlag {
	if lookup(flags, "policy") == nil || lookup(flags, "window") == nil {
		return nil
	}
	i := slices.IndexFunc(gidsFlags, func(f gidsFlag) bool { return f.name == name })
	if i < 0 || gidsFlags[i].to != "" && lookup(flags, gidsFlags[i].to) == nil {
		return nil
	}
	return &gidsFlags[i]
}

// fromGIDS turns their flags, in the order given, into ours; ours are what stands beside them.
func fromGIDS(flags []cli.Flag, theirs, ours flagValues) (flagValues, error) {
	type sized struct{ from, value string }
	set := map[string]sized{}
	var order []string
	for _, v := range theirs {
		f := findGIDS(flags, v.name)
		if f.no != "" {
			return nil, errs.New(errs.Usage, "--%s of GIDS has no counterpart: %s; leave it out",
				f.name, f.no)
		}
		if _, ok := ours.get(f.to); ok {
			return nil, errs.New(errs.Usage, "--%s of GIDS and --%s together; give one",
				f.name, f.to)
		}
		if on, given := theirs.get(f.needs); f.needs != "" && (!given || on == "false") {
			return nil, errs.New(errs.Usage,
				"--%s of GIDS does nothing without its --%s; give both, or --%s", f.name,
				f.needs, f.to)
		}
		value := v.value
		if !f.value && strings.EqualFold(value, "false") {
			continue
		}
		if f.conv != nil {
			var err error
			if value, err = f.conv(v.value); err != nil {
				return nil, errs.New(errs.Usage, "--%s: %w", f.name, err)
			}
		}
		was, ok := set[f.to]
		if !ok {
			order = append(order, f.to)
		}
		// The size is more than the switch, in whatever order they stand.
		if !ok || f.needs != "" || was.from == f.name {
			set[f.to] = sized{f.name, value}
		}
	}
	out := flagValues{}
	for _, name := range order {
		s := set[name]
		if err := checkValue(lookup(flags, name), s.from, s.value); err != nil {
			return nil, err
		}
		out = append(out, flagValue{name, s.value})
	}
	return out, nil
}
