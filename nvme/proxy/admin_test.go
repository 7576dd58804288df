package proxy

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"
	"unsafe"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"helios/internal/errs"
	"helios/internal/testing/testrig"
	"helios/nvme"
)

func TestRegisters(t *testing.T) {
	g := newRig(t, Config{RAM: true, MaxQueueEntries: 256})
	v, err := nvme.Read64(g.bus, nvme.RegCAP)
	require.NoError(t, err)
	c := nvme.CAP(v)
	assert.Equal(t, 256, c.MQES())
	assert.True(t, c.CQR())
	assert.Equal(t, 4, c.DSTRD())
	assert.NotZero(t, c.TO())
	assert.Equal(t, uint8(1), c.CSS()&1, "NVM command set")
	vs, err := g.bus.Read32(nvme.RegVS)
	require.NoError(t, err)
	assert.Equal(t, "1.4", nvme.Version(vs).String())

	for _, off := range []uint32{1, 2, 3, 0x1000 + uint32(len(g.bus.doorbells))} {
		_, err := g.bus.Read32(off)
		assert.Error(t, err, "offset %#x", off)
		assert.Error(t, g.bus.Write32(off, 0), "offset %#x", off)
	}
	_, err = nvme.Read64(g.bus, 4)
	assert.Error(t, err)
	_, err = g.bus.Doorbell(2 * 65)
	assert.Error(t, err)
	d0, err := g.bus.Doorbell(2)
	require.NoError(t, err)
	d1, err := g.bus.Doorbell(3)
	require.NoError(t, err)
	assert.EqualValues(t, 4<<c.DSTRD(), uintptr(unsafe.Pointer(d1))-uintptr(unsafe.Pointer(d0)))

	// The admin queue's registers do not change under a running controller; CAP never does.
	before, err := g.bus.Read32(nvme.RegAQA)
	require.NoError(t, err)
	g.write32(nvme.RegAQA, 0x00010001)
	g.write32(nvme.RegCAP, 0)
	after, err := g.bus.Read32(nvme.RegAQA)
	require.NoError(t, err)
	assert.Equal(t, before, after)
	again, err := nvme.Read64(g.bus, nvme.RegCAP)
	require.NoError(t, err)
	assert.Equal(t, v, again)

	g.write32(nvme.RegINTMS, 6)
	g.write32(nvme.RegINTMC, 2)
	m, err := g.bus.Read32(nvme.RegINTMS)
	require.NoError(t, err)
	assert.EqualValues(t, 4, m)

	// Doorbells can be rung through the registers, too.
	id := nvme.IdentifyCommand(7, nvme.CNSController, 0, uint64(g.iova), 0)
	*(*nvme.Command)(unsafe.Pointer(&g.adm.SQ[0])) = id
	g.adm.Tail = 1
	g.write32(nvme.RegDoorbells, 1)
	e, ok := g.adm.Get(5 * time.Second)
	require.True(t, ok)
	assert.True(t, e.Status().OK())
}

func TestShutdownAndReset(t *testing.T) {
	g := newRig(t, Config{})
	g.pair(1, 16)
	cc := nvme.MakeCC(12, 6, 4) | nvme.CCEnable
	g.write32(nvme.RegCC, uint32(cc|nvme.CCShutdownNormal))
	assert.Equal(t, 2, g.csts().SHST())
	g.write32(nvme.RegCC, 0)
	assert.False(t, g.csts().RDY())
	assert.Equal(t, 0, g.csts().SHST())
	g.enable()
	// The queues of before are gone, their ids free again.
	g.adm.want(nvme.StatusInvalidQueueID, nvme.DeleteSQCommand(g.nextCID(), 1))
	g.pair(1, 16).must(nvme.FlushCommand(1, 1))
}

// A host that enables the controller with settings that it cannot work with gets CSTS.CFS,
// and recovers by CC.EN = 0.
func TestFatalSettings(t *testing.T) {
	for name, spoil := range map[string]func(g *rig){
		"asq not mapped":  func(g *rig) { _ = nvme.Write64(g.bus, nvme.RegASQ, 0x7f0000000000) },
		"acq not aligned": func(g *rig) { _ = nvme.Write64(g.bus, nvme.RegACQ, uint64(g.adm.cq)+64) },
		"one entry":       func(g *rig) { _ = g.bus.Write32(nvme.RegAQA, 0) },
		"queue outside": func(
			g *rig) {
			_ = g.bus.Write32(nvme.RegAQA, nvme.MakeAQA(4096, 4096))
		},
	} {
		t.Run(name, func(t *testing.T) {
			g := newRig(t, Config{RAM: true})
			g.write32(nvme.RegCC, 0)
			spoil(g)
			g.write32(nvme.RegCC, uint32(nvme.MakeCC(12, 6, 4)|nvme.CCEnable))
			assert.True(t, g.csts().CFS())
			assert.False(t, g.csts().RDY())
			g.write32(nvme.RegCC, 0)
			g.enable()
		})
	}
	for name, cc := range map[string]nvme.CC{
		"page too large": nvme.MakeCC(12+5, 6, 4), "admin only": nvme.MakeCC(12, 6,
			4) | nvme.CCSetAdminOnly,
	} {
		t.Run(name, func(t *testing.T) {
			g := newRig(t, Config{RAM: true})
			g.write32(nvme.RegCC, 0)
			g.write32(nvme.RegCC, uint32(cc|nvme.CCEnable))
			assert.True(t, g.csts().CFS())
			g.write32(nvme.RegCC, 0)
			assert.False(t, g.csts().CFS())
			g.enable()
		})
	}
}

func TestIdentify(t *testing.T) {
	g := newRig(t, Config{RAM: true, LBABytes: 4096, Serial: "S1", MDTS: 7})
	off := uint64(g.iova)
	g.adm.must(nvme.IdentifyCommand(1, nvme.CNSController, 0, off, 0))
	c := *(*nvme.IdentifyController)(unsafe.Pointer(&g.mem[0]))
	assert.Equal(t, "S1", c.Serial())
	assert.Contains(t, c.Model(), "Helios proxy SSD")
	assert.EqualValues(t, 7, c.MDTS)
	assert.EqualValues(t, 0x66, c.SQES)
	assert.EqualValues(t, 0x44, c.CQES)
	assert.EqualValues(t, 1, c.NN)
	assert.EqualValues(t, 16<<20, c.TNVMCAP.Lo)

	g.adm.must(nvme.IdentifyCommand(1, nvme.CNSNamespace, 1, off, 0))
	n := *(*nvme.IdentifyNamespace)(unsafe.Pointer(&g.mem[0]))
	assert.EqualValues(t, 4096, n.NSZE)
	assert.EqualValues(t, 12, n.Format().LBADS)
	eui := n.EUI64

	g.adm.must(nvme.IdentifyCommand(1, nvme.CNSActiveNSList, 0, off, 0))
	assert.EqualValues(t, []byte{1, 0, 0, 0, 0, 0, 0, 0}, g.mem[:8])
	g.adm.must(nvme.IdentifyCommand(1, nvme.CNSActiveNSList, 1, off, 0))
	assert.EqualValues(t, []byte{0, 0, 0, 0}, g.mem[:4])
	g.adm.must(nvme.IdentifyCommand(1, nvme.CNSNSDescriptors, 1, off, 0))
	assert.EqualValues(t, eui[:], g.mem[4:12])

	// A buffer that crosses a page needs its second PRP.
	clear(g.mem[:8192])
	g.adm.must(nvme.IdentifyCommand(1, nvme.CNSController, 0, off+2048, off+4096))
	assert.Equal(t, "S1", (*nvme.IdentifyController)(unsafe.Pointer(&g.mem[2048])).Serial())
}

// Every admin command that a controller has to refuse, with the status of the specification.
func TestAdminRefusals(t *testing.T) {
	g := newRig(t, Config{MaxQueuePairs: 4, MaxQueueEntries: 64})
	data := uint64(g.iova)
	q := g.ring(1, 1, 64)
	sq, cq := q.sq, q.cq
	with := func(c nvme.Command, f func(*nvme.Command)) nvme.Command { f(&c); return c }
	for name, x := range map[string]struct {
		st  nvme.Status
		cmd nvme.Command
	}{
		"unknown opcode": {nvme.StatusInvalidOpcode, nvme.Command{Opcode: 0x7f}},
		"fused": {nvme.StatusInvalidField, nvme.Command{Opcode: nvme.AdminIdentify,
			Flags: 1}},
		"SGLs": {nvme.StatusInvalidField, nvme.Command{Opcode: nvme.AdminIdentify,
			Flags: 1 << 6}},
		"CNS": {nvme.StatusInvalidField, nvme.IdentifyCommand(0, 0x77, 0,
			data, 0)},
		"identify namespace 2": {nvme.StatusInvalidNamespace,
			nvme.IdentifyCommand(0, nvme.CNSNamespace, 2, data, 0)},
		"identify all": {nvme.StatusInvalidNamespace,
			nvme.IdentifyCommand(0, nvme.CNSNamespace, nvme.NSIDAll, data, 0)},
		"descriptors of 0": {nvme.StatusInvalidNamespace,
			nvme.IdentifyCommand(0, nvme.CNSNSDescriptors, 0, data, 0)},
		"list above all": {nvme.StatusInvalidNamespace,
			nvme.IdentifyCommand(0, nvme.CNSActiveNSList, nvme.NSIDAll, data, 0)},
		"unmapped buffer": {nvme.StatusDataTransferError,
			nvme.IdentifyCommand(0, nvme.CNSController, 0, 0x1000, 0)},
		"byte offset": {nvme.StatusInvalidPRPOffset,
			nvme.IdentifyCommand(0, nvme.CNSController, 0, data+2, 0)},
		"second PRP's offset": {nvme.StatusInvalidPRPOffset,
			nvme.IdentifyCommand(0, nvme.CNSController, 0, data+4, data+4100)},

		"CQ 0":            {nvme.StatusInvalidQueueID, nvme.CreateCQCommand(0, 0, 64, cq)},
		"CQ beyond":       {nvme.StatusInvalidQueueID, nvme.CreateCQCommand(0, 5, 64, cq)},
		"CQ of one entry": {nvme.StatusInvalidQueueSize, nvme.CreateCQCommand(0, 2, 1, cq)},
		"CQ too deep":     {nvme.StatusInvalidQueueSize, nvme.CreateCQCommand(0, 2, 65, cq)},
		"CQ not aligned":  {nvme.StatusInvalidPRPOffset, nvme.CreateCQCommand(0, 2, 16, cq+64)},
		"CQ unmapped": {nvme.StatusDataTransferError, nvme.CreateCQCommand(0, 2, 16,
			0x10000)},
		"CQ scattered": {nvme.StatusInvalidField, with(nvme.CreateCQCommand(0, 2, 16, cq),
			func(c *nvme.Command) { c.CDW11 &^= 1 })},
		"CQ with a vector": {nvme.StatusInvalidVector, with(nvme.CreateCQCommand(0, 2, 16, cq),
			func(c *nvme.Command) { c.CDW11 |= 2 | 3<<16 })},
		"SQ 0":               {nvme.StatusInvalidQueueID, nvme.CreateSQCommand(0, 0, 64, sq, 1)},
		"SQ beyond":          {nvme.StatusInvalidQueueID, nvme.CreateSQCommand(0, 5, 64, sq, 1)},
		"SQ without CQ":      {nvme.StatusInvalidCQ, nvme.CreateSQCommand(0, 2, 64, sq, 3)},
		"SQ to the admin CQ": {nvme.StatusInvalidCQ, nvme.CreateSQCommand(0, 2, 64, sq, 0)},
		"SQ too deep":        {nvme.StatusInvalidQueueSize, nvme.CreateSQCommand(0, 2, 65, sq, 1)},
		"SQ unmapped": {nvme.StatusDataTransferError, nvme.CreateSQCommand(0, 2, 16,
			0x10000, 1)},
		"delete SQ 0": {nvme.StatusInvalidQueueID, nvme.DeleteSQCommand(0, 0)},
		"delete SQ 3": {nvme.StatusInvalidQueueID, nvme.DeleteSQCommand(0, 3)},
		"delete CQ 0": {nvme.StatusInvalidQueueID, nvme.DeleteCQCommand(0, 0)},
		"delete CQ 3": {nvme.StatusInvalidQueueID, nvme.DeleteCQCommand(0, 3)},

		"too many queues": {nvme.StatusInvalidField,
			nvme.SetFeaturesCommand(0, nvme.FeatureNumberOfQueues, 0xffff)},
		"unknown feature":     {nvme.StatusInvalidField, nvme.SetFeaturesCommand(0, 0x66, 0)},
		"get unknown feature": {nvme.StatusInvalidField, nvme.GetFeaturesCommand(0, 0x66)},
		"select": {nvme.StatusInvalidField,
			nvme.GetFeaturesCommand(0, nvme.FeatureArbitration)},
		"save": {nvme.StatusFeatureNotSaveable,
			with(nvme.SetFeaturesCommand(0, nvme.FeatureArbitration, 0),
				func(c *nvme.Command) { c.CDW10 |= 1 << 31 })},
		"power state 1": {nvme.StatusInvalidField,
			nvme.SetFeaturesCommand(0, nvme.FeaturePowerManagement, 1)},
		"log page": {nvme.StatusInvalidLogPage, nvme.GetLogPageCommand(0, 0x55, 0, 512,
			false, data, 0)},
		"log page too long": {nvme.StatusInvalidField, nvme.GetLogPageCommand(0, nvme.LogSMART,
			0, 1<<20, false, data, 0)},
		"log page offset": {nvme.StatusInvalidField,
			with(nvme.GetLogPageCommand(0, nvme.LogSMART, 0, 512, false, data, 0),
				func(c *nvme.Command) { c.CDW12 = 1024 })},
		"SMART of a namespace": {nvme.StatusInvalidField, nvme.GetLogPageCommand(0, nvme.LogSMART,
			1, 512, false, data, 0)},
	} {
		if name == "select" {
			x.cmd.CDW10 |= 5 << 8
		}
		t.Run(name, func(t *testing.T) {
			g.adm.g.t = t
			x.cmd.CID = g.nextCID()
			g.adm.want(x.st, x.cmd)
		})
	}
	g.adm.g.t = t
	assert.Equal(t, uint64(0), g.smart().HostReads.Lo)
	assert.Greater(t, g.smart().ErrorLogEntries.Lo, uint64(30), "each refusal is in the error log")
}

func TestQueueLifecycle(t *testing.T) {
	g := newRig(t, Config{RAM: true, MaxQueuePairs: 8})
	n := g.adm.must(nvme.SetFeaturesCommand(g.nextCID(), nvme.FeatureNumberOfQueues, 3|1<<16))
	assert.EqualValues(t, 3|1<<16, n)
	assert.Equal(t, n, g.adm.must(nvme.GetFeaturesCommand(g.nextCID(), nvme.FeatureNumberOfQueues)))
	q := g.pair(1, 16)
	g.adm.want(nvme.StatusInvalidQueueID, nvme.CreateCQCommand(g.nextCID(), 1, 16, q.cq))
	g.adm.want(nvme.StatusInvalidQueueID, nvme.CreateSQCommand(g.nextCID(), 1, 16, q.sq, 1))
	g.adm.want(nvme.StatusSequenceError, nvme.SetFeaturesCommand(g.nextCID(),
		nvme.FeatureNumberOfQueues, 1|1<<16))
	g.adm.want(nvme.StatusInvalidQueueDelete, nvme.DeleteCQCommand(g.nextCID(), 1))
	// Only two CQs were asked for, but four SQs.
	g.adm.want(nvme.StatusInvalidQueueID, nvme.CreateCQCommand(g.nextCID(), 3, 16, q.cq))
	r := g.ring(4, 1, 16)
	g.adm.must(nvme.CreateSQCommand(g.nextCID(), 4, 16, r.sq, 1))
	r.Put(nvme.FlushCommand(9, 1))
	e, ok := q.Get(5 * time.Second) // two SQs, one CQ
	require.True(t, ok)
	assert.EqualValues(t, 4, e.SQID)
	g.adm.must(nvme.DeleteSQCommand(g.nextCID(), 4))
	g.adm.must(nvme.DeleteSQCommand(g.nextCID(), 1))
	g.adm.must(nvme.DeleteCQCommand(g.nextCID(), 1))
	g.adm.want(nvme.StatusInvalidQueueID, nvme.DeleteCQCommand(g.nextCID(), 1))
	n = g.adm.must(nvme.SetFeaturesCommand(g.nextCID(), nvme.FeatureNumberOfQueues, 99|99<<16))
	assert.EqualValues(t, 7|7<<16, n, "no more than there are")
}

func TestFeatures(t *testing.T) {
	g := newRig(t, Config{})
	for f, v := range map[uint8]uint32{
		nvme.FeatureArbitration: 0x01020304, nvme.FeatureTemperature: 350,
		nvme.FeatureErrorRecovery:     5,
		nvme.FeatureInterruptCoalesce: 0x101, nvme.FeatureInterruptVector: 1 << 16,
		nvme.FeatureWriteAtomicity: 1, nvme.FeatureVolatileCache: 0,
	} {
		g.adm.must(nvme.SetFeaturesCommand(g.nextCID(), f, v))
		assert.Equal(t, v, g.adm.must(nvme.GetFeaturesCommand(g.nextCID(), f)), "feature %02xh", f)
		def := nvme.GetFeaturesCommand(g.nextCID(), f)
		def.CDW10 |= 1 << 8
		assert.NotEqual(t, v, g.adm.must(def), "default of feature %02xh", f)
		can := nvme.GetFeaturesCommand(g.nextCID(), f)
		can.CDW10 |= 3 << 8
		bits := 4
		if f == nvme.FeatureErrorRecovery {
			bits = 6 // per namespace
		}
		assert.EqualValues(t, bits, g.adm.must(can))
	}
	scoped := func(f uint8, nsid uint32) nvme.Command {
		cmd := nvme.SetFeaturesCommand(g.nextCID(), f, 0)
		cmd.NSID = nsid
		return cmd
	}
	g.adm.must(scoped(nvme.FeatureErrorRecovery, 1))
	g.adm.must(scoped(nvme.FeatureTemperature, nvme.NSIDAll))
	g.adm.want(nvme.NewStatus(1, 0x0f, false), scoped(nvme.FeatureTemperature, 1))
	g.adm.want(nvme.NewStatus(1, 0x0f, false), scoped(nvme.FeatureNumberOfQueues, 1))
	g.adm.want(nvme.StatusInvalidNamespace, scoped(nvme.FeatureArbitration, 2))
	g.adm.want(nvme.StatusInvalidField, scoped(0x7f, 1))
	// Writes go through to the medium now; they still work.
	g.pair(1, 8).must(nvme.WriteCommand(1, 1, 0, 8, uint64(g.iova), 0))

	ram := newRig(t, Config{RAM: true})
	ram.adm.want(nvme.StatusInvalidField, nvme.SetFeaturesCommand(1, nvme.FeatureVolatileCache, 0))
	ram.adm.want(nvme.StatusInvalidField, nvme.GetFeaturesCommand(1, nvme.FeatureVolatileCache))
}

func TestLogPages(t *testing.T) {
	g := newRig(t, Config{RAM: true})
	q := g.pair(1, 16)
	q.want(nvme.StatusLBAOutOfRange, nvme.ReadCommand(77, 1, 1<<40, 1, uint64(g.iova), 0))
	q.want(nvme.StatusInvalidOpcode, nvme.Command{Opcode: 0x55, CID: 78, NSID: 1})
	g.adm.must(nvme.GetLogPageCommand(1, nvme.LogErrorInformation, nvme.NSIDAll, 3*64, false,
		uint64(g.iova), 0))
	log := *(*[3]nvme.ErrorLogEntry)(unsafe.Pointer(&g.mem[0]))
	assert.EqualValues(t, 2, log[0].ErrorCount, "newest first")
	assert.EqualValues(t, 78, log[0].CID)
	assert.True(t, log[0].Status().Is(nvme.StatusInvalidOpcode))
	assert.EqualValues(t, 1, log[1].SQID)
	assert.EqualValues(t, 1<<40, log[1].LBA)
	assert.Zero(t, log[2].ErrorCount)
	for range 2 * errorLogEntries {
		q.want(nvme.StatusInvalidNamespace, nvme.ReadCommand(79, 9, 0, 1, uint64(g.iova), 0))
	}
	g.adm.must(nvme.GetLogPageCommand(1, nvme.LogErrorInformation, nvme.NSIDAll, errorLogEntries*64,
		false, uint64(g.iova), 0))
	whole := *(*[errorLogEntries]nvme.ErrorLogEntry)(unsafe.Pointer(&g.mem[0]))
	for i, e := range whole {
		assert.EqualValues(t, 2+2*errorLogEntries-i, e.ErrorCount)
	}
	g.adm.must(nvme.GetLogPageCommand(1, nvme.LogFirmwareSlot, nvme.NSIDAll, 512, false,
		uint64(g.iova), 0))
	assert.EqualValues(t, 1, g.mem[0])
	off := nvme.GetLogPageCommand(1, nvme.LogErrorInformation, nvme.NSIDAll, 64, false,
		uint64(g.iova), 0)
	off.CDW12 = 64
	g.adm.must(off)
	assert.EqualValues(t, 2+2*errorLogEntries-1,
		(*nvme.ErrorLogEntry)(unsafe.Pointer(&g.mem[0])).ErrorCount)
}

// A doorbell value that is no place in its queue is not heard; the next one mends it.
func TestBadDoorbells(t *testing.T) {
	g := newRig(t, Config{RAM: true})
	q := g.pair(1, 16)
	nvme.StoreDoorbell(q.SQDoorbell, 16) // one beyond the ring
	g.bus.Kick(1)
	g.bus.Kick(40) // no such queue
	_, ok := q.Get(20 * time.Millisecond)
	require.False(t, ok)
	nvme.StoreDoorbell(q.SQDoorbell, 0)
	q.must(nvme.FlushCommand(1, 1)) // the queue is as before
}

func TestOpenErrors(t *testing.T) {
	testrig.CheckLeaks(t)
	dir := t.TempDir()
	path := newFile(t, 1<<20, false)
	small := dir + "/small"
	require.NoError(t, os.WriteFile(small, make([]byte, 100), 0o600))
	for name, x := range map[string]struct {
		cfg   Config
		class errs.Class
		says  string
	}{
		"no path":     {Config{}, errs.Usage, "path"},
		"not there":   {Config{Path: dir + "/none"}, errs.Usage, "none"},
		"a directory": {Config{Path: dir}, errs.Usage, "neither a file"},
		"a terminal":  {Config{Path: "/dev/null"}, errs.Usage, "neither a file"},
		"too small":   {Config{Path: small}, errs.Usage, "less than one"},
		"truncated":   {Config{Path: path, Bytes: 2 << 20}, errs.Usage, "truncated"},
		"LBA":         {Config{Path: path, LBABytes: 520}, errs.Usage, "520"},
		"MDTS":        {Config{Path: path, MDTS: 99}, errs.Usage, "MDTS"},
		"queues":      {Config{Path: path, MaxQueuePairs: 5000}, errs.Usage, "queue pairs"},
		"entries":     {Config{Path: path, MaxQueueEntries: 1}, errs.Usage, "entries"},
		"serial":      {Config{Path: path, Serial: strings.Repeat("x", 21)}, errs.Usage, "serial"},
		"ram cached":  {Config{Path: path, RAM: true, Buffered: true}, errs.Usage, "RAM"},
		"negative":    {Config{Path: path, Bytes: -1}, errs.Usage, "capacity"},
	} {
		_, err := Open(x.cfg)
		if assert.Error(t, err, name) {
			assert.Contains(t, err.Error(), x.says, name)
			assert.Equal(t, x.class, errs.ClassOf(err), name)
		}
	}
	assert.Equal(t, errs.Refused, errs.ClassOf(Create(path, 1<<20)), "a file that exists")
	assert.Equal(t, errs.Usage, errs.ClassOf(Create(dir+"/x", 1000)))
	assert.Equal(t, errs.Usage, errs.ClassOf(Create(dir+"/no/x", 4096)))
	err := Create(dir+"/huge", 1<<62)
	assert.Equal(t, errs.Usage, errs.ClassOf(err), "%v", err)
	_, err = os.Stat(dir + "/huge")
	assert.ErrorIs(t, err, os.ErrNotExist, "a failed Create leaves nothing behind")
}

func TestLocking(t *testing.T) {
	testrig.CheckLeaks(t)
	for _, ram := range []bool{false, true} {
		path := newFile(t, 1<<20, ram)
		a, err := Open(Config{Path: path, RAM: ram})
		require.NoError(t, err)
		_, err = Open(Config{Path: path, RAM: ram})
		require.Error(t, err)
		assert.Equal(t, errs.Refused, errs.ClassOf(err))
		assert.Contains(t, err.Error(), "pid", "names the holder")
		_, err = Open(Config{Path: path, RAM: ram, ReadOnly: true})
		assert.Equal(t, errs.Refused, errs.ClassOf(err))
		require.NoError(t, a.Close())
		require.NoError(t, a.Close(), "twice")
		r1, err := Open(Config{Path: path, RAM: ram, ReadOnly: true})
		require.NoError(t, err)
		r2, err := Open(Config{Path: path, RAM: ram, ReadOnly: true})
		require.NoError(t, err, "readers share")
		require.NoError(t, errors.Join(r1.Close(), r2.Close()))
		_, err = r1.Read32(nvme.RegCSTS)
		assert.ErrorIs(t, err, nvme.ErrClosed)
		_, err = r1.MapDMA(make([]byte, 8192)[4096:])
		assert.Error(t, err)
	}
}

// The error for an SSD that another process holds names that process.
func TestLockHolder(t *testing.T) {
	tool, err := exec.LookPath("flock")
	if err != nil {
		t.Skip("no flock command here")
	}
	path := newFile(t, 1<<20, false)
	cmd := exec.Command(tool, path, "cat")
	in, err := cmd.StdinPipe()
	require.NoError(t, err)
	out, err := cmd.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, cmd.Start())
	_, err = in.Write([]byte("locked\n"))
	require.NoError(t, err)
	_, err = out.Read(make([]byte, 7)) // cat answers, so the lock is held
	require.NoError(t, err)
	_, err = Open(Config{Path: path})
	require.Error(t, err)
	assert.Equal(t, errs.Refused, errs.ClassOf(err))
	assert.Contains(t, err.Error(), fmt.Sprintf("process %d (\"flock\")", cmd.Process.Pid))
	require.NoError(t, in.Close())
	require.NoError(t, cmd.Wait())
	b, err := Open(Config{Path: path})
	require.NoError(t, err)
	require.NoError(t, b.Close())
}

// The real driver brings the controller up, uses it and takes it down.
func TestWithDriver(t *testing.T) {
	for name, cfg := range kinds() {
		t.Run(name, func(t *testing.T) {
			testrig.CheckLeaks(t)
			cfg.Path = newFile(t, 8<<20, cfg.RAM)
			bus, err := Open(cfg)
			require.NoError(t, err)
			ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
			defer cancel()
			c, err := nvme.Open(ctx, bus, nvme.Options{})
			require.NoError(t, err)
			assert.EqualValues(t, 8<<20, c.Namespace().Blocks*uint64(c.Namespace().LBABytes))
			qp, err := c.CreateQueuePair(ctx, 64)
			require.NoError(t, err)
			*(*nvme.Command)(unsafe.Pointer(&qp.SQ[0])) = nvme.FlushCommand(5, c.Namespace().ID)
			nvme.StoreDoorbell(qp.SQDoorbell, 1)
			bus.Kick(qp.ID)
			for deadline := time.Now().Add(10 * time.Second); ; {
				e, ok := nvme.LoadCompletion((*nvme.Completion)(unsafe.Pointer(&qp.CQ[0])), true)
				if ok {
					assert.True(t, e.Status().OK())
					break
				}
				require.True(t, time.Now().Before(deadline))
				bus.WaitCQ(qp.ID, time.Second)
			}
			require.NoError(t, c.DeleteQueuePair(ctx, qp))
			require.NoError(t, c.Reset(ctx))
			s, err := c.SMART(ctx)
			require.NoError(t, err)
			assert.EqualValues(t, 1, s.PowerCycles.Lo)
			require.NoError(t, c.Close(ctx))
		})
	}
}
