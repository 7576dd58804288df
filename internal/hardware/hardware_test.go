package hardware

import (
	"math"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"helios/internal/errs"
	"helios/internal/ssdmodel"
)

func TestBuiltinProfiles(t *testing.T) {
	require.Equal(t, []string{"a100-980pro", "a100-optane", "a100-p5510x12", "h100-pm1753x16",
		"host"}, Names())
	for _, name := range Names() {
		p, err := Load(name)
		require.NoError(t, err)
		require.Equal(t, name, p.Name)
		require.NotEmpty(t, p.About)
		_, err = ssdmodel.Load(p.SSDs.Model)
		require.NoError(t, err)
		figures := 0
		each(p, func(path string, f *Figure, c *Cost) {
			figures++
			source := ""
			if f != nil {
				source = f.Source
			} else {
				source = c.Source
			}
			require.NotEmpty(t, strings.TrimSpace(source), "%s: %s", name, path)
		})
		require.Greater(t, figures, 60)
	}
}

func load(t *testing.T, text string) (*Profile, error) {
	t.Helper()
	path := filepath.Join(t.TempDir(), "p.yaml")
	require.NoError(t, os.WriteFile(path, []byte(text), 0o600))
	return Load(path)
}

func TestFileOnABase(t *testing.T) {
	p, err := load(t,
		"base: a100-p5510x12\nname: mine\nssds: {model: optane, count: {value: 3, source: mine}}\ngpu: {sms: {value: 10, source: MIG}}\n")
	require.NoError(t, err)
	require.Equal(t, "mine", p.Name)
	require.Equal(t, 10, p.GPU.SMs.Int())
	require.Equal(t, "optane", p.SSDs.Model)
	require.Equal(t, 25000., p.GPU.LaunchNS.Value, "from the base")
	require.Empty(t, p.Base)
}

// SSDs of several models follow each other, and a machine with more of them goes on in turns.
func TestUnequalSSDs(t *testing.T) {
	p, err := load(t, "base: host\nname: mixed\nssds:\n  model: p5510\n  count: {value: 2, source: s}\n"+
		"  more: [{model: optane, count: {value: 1, source: s}}]\n")
	require.NoError(t, err)
	require.Equal(t, []string{"p5510", "p5510", "optane"}, p.SSDs.Models(0))
	require.Equal(t, []string{"p5510"}, p.SSDs.Models(1))
	require.Equal(t, []string{"p5510", "p5510", "optane", "p5510"}, p.SSDs.Models(4))
	for text, want := range map[string]string{
		"{model: optane, count: {value: 1}}":               "ssds.more[0].count has no source",
		"{count: {value: 1, source: s}}":                   "ssds.more[0].model is missing",
		"{model: optane, count: {value: 0, source: s}}":    "ssds.more[0].count is 0",
		"{model: optane, count: {value: 1024, source: s}}": "ssds has 1025",
	} {
		_, err := load(t, "base: host\nname: x\nssds: {model: p5510, count: {value: 1, source: s}, more: ["+
			text+"]}\n")
		require.ErrorContains(t, err, want)
	}
}

func TestProfilesThatAreRefused(t *testing.T) {
	for _, c := range []struct{ text, want string }{
		{"base: a100-p5510x12\nname: x\ngpu: {sms: {value: 0, source: s}}\n",
			"gpu.sms is 0: give at least 1"},
		{"base: a100-p5510x12\nname: x\ngpu: {sms: {value: 8}}\n", "gpu.sms has no source"},
		{"base: a100-p5510x12\nname: x\ngpu: {sms: {valeu: 8, source: s}}\n",
			`unknown key "valeu"`},
		{"base: a100-p5510x12\nname: x\ngpu: {sms: 8}\n", "a figure is {value"},
		{"base: a100-p5510x12\nname: x\ngpu: {sm: {value: 8, source: s}}\n", "field sm not found"},
		{"base: a100-p5510x12\nname: x\ngpu: {launch_ns: {value: -1, source: s}}\n",
			"gpu.launch_ns is -1: give 0 or more"},
		{"base: a100-p5510x12\nname: x\ngpu: {io: {ring: {ns: -1, source: s}}}\n",
			"gpu.io.ring has a negative part"},
		{"base: a100-p5510x12\nname: x\ngpu: {io: {state: moon}}\n", `gpu.io.state is "moon"`},
		{"name: x\n", "has no source"},
		{"base: nothing\nname: x\n", `no hardware profile "nothing"`},
		{"base: ./p.yaml\nname: x\n", "is there a circle?"},
		{"", "is empty"},
		{"\nroot:x:0:0\n", `line 2 is not "key: value"`},
		{"name: [\n", "p.yaml"},
	} {
		_, err := load(t, c.text)
		require.ErrorContains(t, err, c.want, c.text)
		require.Equal(t, errs.Usage, errs.ClassOf(err), c.text)
	}
	_, err := Load("vax")
	require.ErrorContains(t, err, "choose a100-980pro, a100-optane")
	_, err = Load("./not-there.yaml")
	require.ErrorContains(t, err, "built in are")
}

func TestLinkRate(t *testing.T) {
	l := Link{RawGBs: Figure{Value: 31.5}, MaxPayload: Figure{Value: 256},
		PacketOver: Figure{Value: 28}}
	require.InDelta(t, 31.5e9*256/284, l.Rate(4096), 1e6)
	require.InDelta(t, 31.5e9*16/44, l.Rate(16), 1e6)
	require.EqualValues(t, 4096+16*28, l.WireBytes(4096))
	l.CeilingGBs.Value = 20
	require.InDelta(t, 20e9, l.Rate(4096), 1)
	require.InDelta(t, 4096*31.5/20, float64(l.WireBytes(4096)), 1)
	require.Zero(t, l.Rate(0))
}

func TestKernelTimes(t *testing.T) {
	p, err := Load("a100-p5510x12")
	require.NoError(t, err)
	g := &p.GPU
	// Memory bound: a gigabyte at 0.8 of 1,700 GB/s, whether all SMs or the half that is enough
	// run.
	want := 1e9 / (1700 * 0.8)
	require.InDelta(t, want, float64(g.KernelNS(g.Ops.Gather, Work{Bytes: 1e9}, 0)), 1)
	require.InDelta(t, want, float64(g.KernelNS(g.Ops.Gather, Work{Bytes: 1e9}, 54)), 1)
	require.InDelta(t, want*2, float64(g.KernelNS(g.Ops.Gather, Work{Bytes: 1e9}, 27)), 2)
	// Arithmetic: by the SMs.
	require.InDelta(t, 1e12/(156e3*0.4)*4, float64(g.KernelNS(g.Ops.GEMM, Work{Flops: 1e12}, 27)),
		2)
	require.InDelta(t, 1e6*50/108., float64(g.KernelNS(g.Ops.Sample, Work{Items: 1e6}, 0)), 1)
	require.InDelta(t, 1300+400, g.TimeAt(g.IO.Look, StateHost), 0.1)
	require.InDelta(t, 400+400, g.Time(g.IO.Look), 0.1)
}

// Each number of a profile has bounds, and an error names the one that is out of them.
func TestEveryFigureIsBounded(t *testing.T) {
	p, err := Load("a100-p5510x12")
	require.NoError(t, err)
	n := 0
	each(p, func(path string, f *Figure, c *Cost) {
		values := map[string]*float64{}
		if f != nil {
			values[path] = &f.Value
		} else {
			values[path], values[path+".memory_ways"], values[path+".state_ways"] = &c.NS, &c.MemoryWays,
				&c.StateWays
		}
		for name, v := range values {
			was := *v
			for _, bad := range []float64{1e308, -1, -1e308, math.NaN(), math.Inf(1), math.Inf(-1),
				5e-324, 1e19} {
				*v = bad
				err := p.check()
				require.ErrorContains(t, err, strings.TrimSuffix(name, ".memory_ways"), "%s %v", name, bad)
				require.Equal(t, errs.Usage, errs.ClassOf(err))
				n++
			}
			*v = was
		}
	})
	require.Greater(t, n, 500)
	require.NoError(t, p.check())
}
