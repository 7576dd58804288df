package nvme

import (
	"encoding/binary"
	"errors"
	"fmt"
	"reflect"
	"strings"
	"testing"

	"helios/internal/errs"
)

// The words of every status that a command of ours can end with, and of none that is reserved.
func TestStatusWords(t *testing.T) {
	type span struct{ lo, hi uint8 }
	known := map[uint8][]span{
		SCTGeneric: {{0x00, 0x16}, {0x18, 0x24}, {0x80, 0x84}, {0x88, 0x88}},
		SCTCommand: {{0x00, 0x03}, {0x05, 0x05}, {0x08, 0x09}, {0x0c, 0x0f}, {0x14, 0x14},
			{0x80, 0x83}},
		SCTMedia: {{0x80, 0x88}},
		SCTPath:  {{0x00, 0x03}, {0x60, 0x60}, {0x70, 0x71}},
	}
	seen := map[string]Status{}
	for sct := range uint8(8) {
		for sc := range 256 {
			s := NewStatus(sct, uint8(sc), false)
			named := false
			for _, k := range known[sct] {
				named = named || uint8(sc) >= k.lo && uint8(sc) <= k.hi
			}
			w, in := statusWords[uint16(s)]
			if in != named {
				t.Errorf("SCT %Xh SC %02Xh: in the table %v (%q), want %v", sct, sc, in, w, named)
			}
			if s.Words() == "" || in && s.Words() != w {
				t.Errorf("SCT %Xh SC %02Xh: %q", sct, sc, s.Words())
			}
			if in {
				if o, dup := seen[w]; dup {
					t.Errorf("%q is %v and %v", w, o, s)
				}
				seen[w] = s
			} else if w := s.Words(); !strings.Contains(w, "unknown") && !strings.Contains(w,
				"specific") && !strings.Contains(w, "reserved") {
				t.Errorf("%v has a name", s)
			}
		}
	}
	for s, want := range map[Status]string{
		StatusSuccess:                 "successful completion (SCT 0h, SC 00h)",
		StatusInvalidPRPOffset:        "PRP offset invalid (SCT 0h, SC 13h)",
		StatusLBAOutOfRange:           "LBA out of range (SCT 0h, SC 80h)",
		StatusInvalidQueueDelete:      "invalid queue deletion (SCT 1h, SC 0Ch)",
		StatusUnrecoveredRead:         "unrecovered read error (SCT 2h, SC 81h)",
		NewStatus(3, 0x71, true):      "command aborted by host (SCT 3h, SC 71h)",
		NewStatus(7, 0x12, false):     "vendor specific status (SCT 7h, SC 12h)",
		NewStatus(0, 0xc5, false):     "vendor specific status (SCT 0h, SC C5h)",
		NewStatus(1, 0x75, false):     "directive specific status (SCT 1h, SC 75h)",
		NewStatus(1, 0x2e, false):     "unknown command specific status (SCT 1h, SC 2Eh)",
		NewStatus(2, 0x00, false):     "unknown media or data integrity error (SCT 2h, SC 00h)",
		NewStatus(0, 0x17, false):     "unknown generic command status (SCT 0h, SC 17h)",
		NewStatus(3, 0x05, false):     "unknown path related status (SCT 3h, SC 05h)",
		NewStatus(5, 0x01, false):     "status of a reserved type (SCT 5h, SC 01h)",
		Status(0x281 | 3<<11 | 1<<13): "unrecovered read error (SCT 2h, SC 81h)",
	} {
		if got := s.String(); got != want {
			t.Errorf("%#x: %q, want %q", uint16(s), got, want)
		}
	}
}

func TestStatusFields(t *testing.T) {
	s := Status(0x281 | 2<<11 | 1<<13 | 1<<14)
	if s.SCT() != 2 || s.SC() != 0x81 || s.CRD() != 2 || !s.More() || !s.DNR() || s.OK() ||
		!s.Is(StatusUnrecoveredRead) {
		t.Errorf("%#x", uint16(s))
	}
	if !Status(1<<14|1<<13).OK() || StatusUnrecoveredRead.DNR() ||
		!StatusUnrecoveredRead.WithDNR().DNR() {
		t.Error("flags")
	}
	c := Completion{StatusPhase: StatusPhase(s, true)}
	if c.Status() != s || !c.Phase() {
		t.Errorf("%+v", c)
	}
}

func TestErrorTexts(t *testing.T) {
	for _, c := range []struct {
		err  error
		want string
	}{
		{&StatusError{Bus: "0000:3b:00.0", QID: 7, Op: "read", LBA: 128000, Blocks: 8,
			Status: StatusUnrecoveredRead.WithDNR()},
			`nvme 0000:3b:00.0 q7: read LBA 128000+8: unrecovered read error (SCT 2h, SC 81h), not retryable; run "heliosctl verify --ssds 0000:3b:00.0"`},
		{&StatusError{Bus: "proxy:/d/a.img", QID: 1, Op: "write", LBA: 1 << 40, Blocks: 1,
			Status: StatusWriteFault},
			`nvme proxy:/d/a.img q1: write LBA 1099511627776+1: write fault (SCT 2h, SC 80h), retryable; see its health with "heliosctl ssds", free space under a file-backed SSD, or replace it`},
		{&StatusError{Bus: "x", Op: "flush", QID: 2, Status: StatusNamespaceNotReady},
			"nvme x q2: flush: namespace not ready (SCT 0h, SC 82h), retryable; wait and run it again"},
		{&StatusError{Bus: "x", Op: "read", QID: 2, Blocks: 1,
			Status: StatusLBAOutOfRange.WithDNR()},
			`nvme x q2: read LBA 0+1: LBA out of range (SCT 0h, SC 80h), not retryable; the data lies beyond the SSD's end: bind the SSD that was loaded, or run "heliosctl load" again`},
		{&StatusError{Bus: "x", Op: "identify controller", Status: StatusInternalError},
			`nvme x q0: identify controller: internal error (SCT 0h, SC 06h), retryable; check the SSD with "heliosctl ssds"`},
		{&StatusError{Bus: "x", Op: "write", QID: 1, Blocks: 1, Status: StatusNamespaceReadOnly},
			"nvme x q1: write LBA 0+1: namespace is write protected (SCT 0h, SC 20h), retryable; the SSD does not accept this access; bind it writable, or choose another"},
		{&StatusError{Bus: "x", Op: "read", QID: 1, Blocks: 1, Status: StatusAbortRequested},
			"nvme x q1: read LBA 0+1: command abort requested (SCT 0h, SC 07h), retryable; the command was given up, not refused; run it again"},
		{&TimeoutError{Bus: "x", QID: 3, Op: "read", After: 5e9, Next: "reset it"},
			"nvme x q3: read: no answer in 5s; reset it"},
		{&ProtocolError{Bus: "x", QID: 3,
			What: "a completion of command 0001h, which is not in flight"},
			"nvme x q3: a completion of command 0001h, which is not in flight; reset the controller, and update its firmware if it happens again"},
		{&FatalError{"x", "get log page", 3, ErrFatal},
			"nvme x: get log page: controller fatal status (CSTS 00000003h); reset the controller; if it does so again, replace the SSD"},
		{&FatalError{"x", "get log page", 0xffffffff, ErrGone},
			"nvme x: get log page: device is gone (CSTS FFFFFFFFh); check that the SSD is still plugged in and bound"},
	} {
		if got := c.err.Error(); got != c.want {
			t.Errorf("got  %s\nwant %s", got, c.want)
		}
		if wrapped := fmt.Errorf("load: %w", c.err); errs.ClassOf(wrapped) != errs.Device {
			t.Errorf("class of %v is %d", c.err, errs.ClassOf(wrapped))
		}
	}
}

// Every status has a remedy: an error never ends in an empty next step.
func TestEveryStatusHasARemedy(t *testing.T) {
	for s := range Status(0x800) {
		e := &StatusError{Bus: "b", Op: "read", Status: s}
		if r := e.remedy(); len(r) < 10 {
			t.Errorf("%v: remedy %q", s, r)
		}
	}
}

func TestRegisters(t *testing.T) {
	c := MakeCAP(4096, 20, 4, 0, 3)
	if c.MQES() != 4096 || c.TO() != 20 || c.DSTRD() != 4 || c.MPSMIN() != 0 || c.MPSMAX() != 3 ||
		!c.CQR() || c.CSS() != 1 || c.CRMS() != 0 {
		t.Errorf("CAP %#x", uint64(c))
	}
	if c := MakeCAP(65536, 0, 0, 0, 0); c.MQES() != 65536 {
		t.Errorf("CAP %#x: %d entries", uint64(c), c.MQES())
	}
	cc := MakeCC(12, 6, 4) | CCEnable
	if cc != 0x00460001 || !cc.EN() || cc.PageBytes() != 4096 || cc.IOSQES() != 6 ||
		cc.IOCQES() != 4 || cc.CSS() != 0 || cc.AMS() != 0 || cc.SHN() != 0 {
		t.Errorf("CC %#x", uint32(cc))
	}
	if (cc|CCShutdownNormal).SHN() != 1 || (cc|CCShutdownAbrupt).SHN() != 2 ||
		(cc|CCSetIO).CSS() != 6 || MakeCC(16, 6, 4).PageBytes() != 65536 {
		t.Error("CC fields")
	}
	s := CSTS(0xb)
	if !s.RDY() || !s.CFS() || s.SHST() != 2 {
		t.Errorf("CSTS %#x", uint32(s))
	}
	if MakeAQA(32, 4096) != 0xfff<<16|31 {
		t.Errorf("AQA %#x", MakeAQA(32, 4096))
	}
	for v, want := range map[Version]string{0x10400: "1.4", 0x20001: "2.0.1", 0x10201: "1.2.1"} {
		if v.String() != want {
			t.Errorf("%#x: %s", uint32(v), v)
		}
	}
}

func TestCommands(t *testing.T) {
	le := func(c Command) string { return fmt.Sprintf("%x", raw(&c)) }
	read := ReadCommand(0x1234, 1, 0x1122334455667788, 8, 0xaabbccdd00, 0x1000)
	want := "02003412" + "01000000" + "00000000" + "00000000" + "0000000000000000" +
		"00ddccbbaa000000" + "0010000000000000" +
		"88776655" + "44332211" + "07000000" + "00000000" + "00000000" + "00000000"
	if le(read) != want {
		t.Errorf("read  %s\nwant  %s", le(read), want)
	}
	if lba, n := read.LBARange(); lba != 0x1122334455667788 || n != 8 {
		t.Errorf("range %d+%d", lba, n)
	}
	w := WriteCommand(1, 2, 3, MaxBlocksPerCommand, 4, 5)
	if _, n := w.LBARange(); w.Opcode != OpWrite || n != 65536 || w.CDW12 != 0xffff {
		t.Errorf("%+v", w)
	}
	if c := FlushCommand(9, 1); c != (Command{Opcode: 0, CID: 9, NSID: 1}) {
		t.Errorf("%+v", c)
	}
	for _, n := range []uint32{0, MaxBlocksPerCommand + 1, 1 << 31} {
		func() {
			defer func() {
				if recover() == nil {
					t.Errorf("%d blocks accepted", n)
				}
			}()
			ReadCommand(0, 1, 0, n, 0, 0)
		}()
	}
	for _, n := range []int{4, 512, 4096, 1 << 20} {
		c := GetLogPageCommand(0, LogSMART, NSIDAll, n, true, 0, 0)
		if c.LogPageBytes() != int64(n) || c.CDW10&0xff != LogSMART || c.CDW10>>15&1 != 1 ||
			c.NSID != 0xffffffff {
			t.Errorf("%d bytes: %+v", n, c)
		}
	}
}

func TestUint128(t *testing.T) {
	for u, want := range map[Uint128]string{{}: "0", {1000, 0}: "1000",
		{0, 1}:                   "18446744073709551616",
		{^uint64(0), ^uint64(0)}: "340282366920938463463374607431768211455"} {
		if u.String() != want {
			t.Errorf("%v", u)
		}
	}
}

func TestASCIIFields(t *testing.T) {
	for in, want := range map[string]string{"abc   ": "abc", "  x y ": "x y", "a\x00b": "a",
		"e\x1b[31mz": "e?[31mz", "\xff\xfe": "??", "": ""} {
		if got := asciiField([]byte(in)); got != want {
			t.Errorf("%q: %q, want %q", in, got, want)
		}
	}
	var b [8]byte
	SetASCII(b[:], "toolongtext")
	if string(b[:]) != "toolongt" {
		t.Errorf("%q", b)
	}
}

// The offset of every field that has a name, as the specification's figures give it.
func TestOffsets(t *testing.T) {
	check := func(v any, want map[string]uintptr) {
		typ := reflect.TypeOf(v)
		for i := range typ.NumField() {
			f := typ.Field(i)
			if f.Name == "_" {
				continue
			}
			if off, in := want[f.Name]; !in || off != f.Offset {
				t.Errorf("%s.%s is at %d, want %d", typ.Name(), f.Name, f.Offset, off)
			}
		}
		for name := range want {
			if _, in := typ.FieldByName(name); !in {
				t.Errorf("%s has no %s", typ.Name(), name)
			}
		}
	}
	check(IdentifyController{}, map[string]uintptr{"VID": 0, "SN": 4, "MN": 24, "FR": 64,
		"MDTS": 77, "CNTLID": 78, "VER": 80, "RTD3R": 84, "RTD3E": 88, "OAES": 92,
		"CNTRLTYPE": 111, "CRDT": 128, "ACL": 258, "AERL": 259, "FRMW": 260, "LPA": 261,
		"ELPE": 262, "WCTEMP": 266, "CCTEMP": 268, "TNVMCAP": 280, "SQES": 512, "CQES": 513,
		"NN": 516, "ONCS": 520, "FUSES": 522, "VWC": 525, "SGLS": 536, "SUBNQN": 768,
		"PSD": 2048, "Vendor": 3072})
	check(IdentifyNamespace{}, map[string]uintptr{"NSZE": 0, "NCAP": 8, "NUSE": 16, "NSFEAT": 24,
		"NLBAF": 25, "FLBAS": 26, "DPS": 29, "NMIC": 30, "NVMCAP": 48, "MCL": 76,
		"ANAGRPID": 92, "NSATTR": 99, "NGUID": 104, "EUI64": 120, "LBAF": 128, "Vendor": 384})
	check(SMARTLog{}, map[string]uintptr{"CriticalWarning": 0, "CompositeTemperature": 1,
		"AvailableSpare": 3, "SpareThreshold": 4, "PercentageUsed": 5, "DataUnitsRead": 32,
		"DataUnitsWritten": 48, "HostReads": 64, "HostWrites": 80, "PowerCycles": 112,
		"PowerOnHours": 128, "UnsafeShutdowns": 144, "MediaErrors": 160,
		"ErrorLogEntries": 176, "TMT2Seconds": 228})
	check(ErrorLogEntry{}, map[string]uintptr{"ErrorCount": 0, "SQID": 8, "CID": 10,
		"StatusPhase": 12, "ParamLocation": 14, "LBA": 16, "NSID": 24})
	check(Command{}, map[string]uintptr{"Opcode": 0, "Flags": 1, "CID": 2, "NSID": 4, "CDW2": 8,
		"CDW3": 12, "MPTR": 16, "PRP1": 24, "PRP2": 32,
		"CDW10": 40, "CDW11": 44, "CDW12": 48, "CDW13": 52, "CDW14": 56, "CDW15": 60})
	check(Completion{}, map[string]uintptr{"DW0": 0, "DW1": 4, "SQHead": 8, "SQID": 10, "CID": 12,
		"StatusPhase": 14})
	check(PowerState{}, map[string]uintptr{"MaxPower": 0, "Flags": 3, "ExitLat": 8})
}

func TestCompletionRoundTrip(t *testing.T) {
	var p Completion
	if _, ok := LoadCompletion(&p, true); ok {
		t.Error("zeroed memory is a new entry in the first pass")
	}
	for _, phase := range []bool{true, false} {
		want := Completion{DW0: 0x01020304, DW1: 5, SQHead: 6, SQID: 7, CID: 0xfffe,
			StatusPhase: StatusPhase(0x7fff, phase)}
		StoreCompletion(&p, want)
		if got, ok := LoadCompletion(&p, phase); !ok || got != want || p != want {
			t.Errorf("%+v %v", got, ok)
		}
		if _, ok := LoadCompletion(&p, !phase); ok {
			t.Error("an entry of the last pass is new")
		}
	}
	var bell uint32
	StoreDoorbell(&bell, 77)
	if bell != 77 {
		t.Error(bell)
	}
}

func TestTransferLimit(t *testing.T) {
	for _, c := range []struct {
		mdts                     uint8
		mpsmin, lba, limit, want int
	}{
		{0, 0, 512, 1 << 20, 1 << 20}, {5, 0, 512, 1 << 20, 128 << 10},
		{5, 0, 4096, 64 << 10, 64 << 10}, {1, 0, 4096, 1 << 20, 8192},
		{255, 0, 512, 1 << 20, 1 << 20}, {20, 0, 512, 1 << 30, 32 << 20}, {0, 0, 4096, 5000, 4096},
	} {
		if got := transferLimit(c.mdts, c.mpsmin, c.lba, c.limit); got != c.want {
			t.Errorf("%+v: %d", c, got)
		}
	}
}

func TestFormatIndex(t *testing.T) {
	n := IdentifyNamespace{NLBAF: 15, FLBAS: 0x7f}
	if n.FormatIndex() != 15 {
		t.Error(n.FormatIndex())
	}
	n.NLBAF = 63
	if n.FormatIndex() != 63 {
		t.Error(n.FormatIndex())
	}
}

func TestMakeNamespace(t *testing.T) {
	ns := func(nsze uint64, lbads, nlbaf, flbas uint8, ms uint16) *IdentifyNamespace {
		n := &IdentifyNamespace{NSZE: nsze, NLBAF: nlbaf, FLBAS: flbas}
		for i := range n.LBAF {
			n.LBAF[i] = LBAFormat{MetadataBytes: ms, LBADS: lbads}
		}
		return n
	}
	for _, c := range []struct {
		n    *IdentifyNamespace
		want string
	}{
		{ns(1<<51-1, 12, 0, 0, 0), ""}, {ns(1<<51, 12, 0, 0, 0), "cannot be"},
		{ns(1<<54, 9, 0, 0, 0), "cannot be"},
		{ns(1, 9, 0, 1, 0), "LBA format 1 is in use, but the last one is 0"},
		{ns(1, 0, 0, 0, 0), "LBAs of 2^0 bytes"}, {ns(1, 255, 0, 0, 0), "LBAs of 2^255 bytes"},
		{ns(1, 9, 0, 0, 64), "64 bytes of metadata"}, {ns(0, 9, 0, 0, 0), "no blocks"},
	} {
		got, err := MakeNamespace(1, c.n)
		if c.want == "" && (err != nil || got.Bytes() <= 0) || c.want != "" &&
			(err == nil || !strings.Contains(err.Error(), c.want)) {
			t.Errorf("%v %v, want %q", got, err, c.want)
		}
	}
}

func le16(b []byte, at int) uint16 { return binary.LittleEndian.Uint16(b[at:]) }
func le32(b []byte, at int) uint32 { return binary.LittleEndian.Uint32(b[at:]) }
func le64(b []byte, at int) uint64 { return binary.LittleEndian.Uint64(b[at:]) }

// pattern is n bytes of which no two neighbours agree, as a seed that shows a wrong offset.
func pattern(n int) []byte {
	b := make([]byte, n)
	for i := range b {
		b[i] = byte(i*7 + i>>8)
	}
	return b
}

func FuzzIdentifyController(f *testing.F) {
	id := newFake().id
	f.Add(append([]byte(nil), raw(&id)...))
	f.Add(pattern(4096))
	f.Add(pattern(4095))
	f.Add([]byte{})
	f.Fuzz(func(t *testing.T, b []byte) {
		c, err := DecodeIdentifyController(b)
		if (err == nil) != (len(b) >= IdentifyBytes) {
			t.Fatalf("%d bytes: %v", len(b), err)
		}
		if err != nil {
			return
		}
		if c.VID != le16(b, 0) || c.MDTS != b[77] || uint32(c.VER) != le32(b, 80) ||
			c.RTD3E != le32(b, 88) || c.OAES != le32(b, 92) || c.CRDT[2] != le16(b, 132) ||
			c.ACL != b[258] || c.AERL != b[259] || c.ELPE != b[262] ||
			c.TNVMCAP != (Uint128{le64(b, 280), le64(b, 288)}) || c.SQES != b[512] ||
			c.NN != le32(b, 516) ||
			c.SGLS != le32(b, 536) || c.PSD[31].ExitLat != le32(b, 2048+31*32+8) {
			t.Fatal("fields differ from the bytes")
		}
		for _, s := range []string{c.Serial(), c.Model(), c.Firmware()} {
			if strings.TrimSpace(s) != s || len(s) > 40 {
				t.Fatalf("text %q", s)
			}
			for _, r := range s {
				if r < 0x20 || r > 0x7e {
					t.Fatalf("text %q", s)
				}
			}
		}
		if n := transferLimit(c.MDTS, 0, 512, 1<<20); n <= 0 || n > 1<<20 || n%512 != 0 {
			t.Fatalf("MDTS %d: %d", c.MDTS, n)
		}
	})
}

func FuzzIdentifyNamespace(f *testing.F) {
	ns := newFake().ns
	f.Add(append([]byte(nil), raw(&ns)...))
	ns.NLBAF, ns.FLBAS = 63, 0x6f
	f.Add(append([]byte(nil), raw(&ns)...))
	f.Add(pattern(4096))
	f.Add(pattern(100))
	f.Fuzz(func(t *testing.T, b []byte) {
		n, err := DecodeIdentifyNamespace(b)
		if (err == nil) != (len(b) >= IdentifyBytes) {
			t.Fatalf("%d bytes: %v", len(b), err)
		}
		if err != nil {
			return
		}
		if n.NSZE != le64(b, 0) || n.NLBAF != b[25] || n.MCL != le32(b, 76) ||
			n.ANAGRPID != le32(b, 92) || n.LBAF[63].LBADS != b[128+63*4+2] {
			t.Fatal("fields differ from the bytes")
		}
		if i := n.FormatIndex(); i < 0 || i >= len(n.LBAF) {
			t.Fatalf("format %d", i)
		}
		if ns, err := MakeNamespace(1, &n); err == nil {
			if ns.LBABytes != 512 && ns.LBABytes != 4096 || ns.Blocks != n.NSZE ||
				ns.Bytes() <= 0 || n.Format().MetadataBytes != 0 {
				t.Fatalf("%+v from %+v", ns, n.Format())
			}
		}
	})
}

func FuzzActiveNamespaces(f *testing.F) {
	f.Add([]byte{1, 0, 0, 0, 2, 0, 0, 0, 0, 0, 0, 0})
	f.Add([]byte{2, 0, 0, 0, 1, 0, 0, 0})
	f.Add([]byte{0xff, 0xff, 0xff, 0xff})
	f.Add(pattern(5000))
	f.Fuzz(func(t *testing.T, b []byte) {
		ids, err := DecodeActiveNamespaces(b)
		if err != nil {
			return
		}
		if len(ids) > MaxActiveNSPerList {
			t.Fatalf("%d namespaces", len(ids))
		}
		for i, id := range ids {
			if id == 0 || id >= NSIDAll-1 || i > 0 && id <= ids[i-1] || id != le32(b, 4*i) {
				t.Fatalf("namespaces %v", ids)
			}
		}
	})
}

func FuzzLogPages(f *testing.F) {
	f.Add(pattern(512))
	f.Add(pattern(256 * 64))
	f.Add(make([]byte, 128))
	f.Add([]byte{1})
	f.Fuzz(func(t *testing.T, b []byte) {
		l, err := DecodeSMARTLog(b)
		if (err == nil) != (len(b) >= SMARTLogBytes) {
			t.Fatalf("%d bytes: %v", len(b), err)
		}
		if err == nil {
			if l.Temperature() != int(le16(b, 1)) ||
				l.HostReads != (Uint128{le64(b, 64), le64(b, 72)}) ||
				l.MediaErrors.Lo != le64(b, 160) || l.TMT2Seconds != le32(b, 228) {
				t.Fatal("fields differ from the bytes")
			}
			if s := l.HostReads.String(); s == "" || s[0] == '-' {
				t.Fatal(s)
			}
			m := l
			m.SetTemperature(uint16(l.Temperature()))
			if m != l {
				t.Fatal("temperature does not round trip")
			}
		}
	})
}

func FuzzCompletion(f *testing.F) {
	f.Add(pattern(16), true)
	f.Add(make([]byte, 16), true)
	f.Add([]byte{0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0}, true)
	f.Add(pattern(15), false)
	f.Fuzz(func(t *testing.T, b []byte, phase bool) {
		c, err := decode[Completion](b, "completion")
		if (err == nil) != (len(b) >= CompletionBytes) {
			t.Fatalf("%d bytes: %v", len(b), err)
		}
		if err != nil {
			return
		}
		if c.DW0 != le32(b, 0) || c.SQHead != le16(b, 8) || c.SQID != le16(b, 10) ||
			c.CID != le16(b, 12) || uint16(c.Status())<<1 != le16(b, 14)&^1 {
			t.Fatal("fields differ from the bytes")
		}
		if got, ok := LoadCompletion(&c, phase); ok != (c.Phase() == phase) || ok && got != c {
			t.Fatalf("%+v %v, want %+v", got, ok, c)
		}
		if StatusPhase(c.Status(), c.Phase()) != c.StatusPhase {
			t.Fatalf("status field %#x does not round trip", c.StatusPhase)
		}
		// A whole admin queue makes an error or a retired command of it, never more.
		ctl := &Controller{bus: newFake(), gate: errStarting}
		ctl.adm = adminQueue{entries: 8, sqTail: 5, sqHead: 2, slots: make([]slot, 7)}
		ctl.adm.slots[0].state, ctl.adm.slots[1].state = slotBusy, slotQuarantined
		err = ctl.retireLocked(c)
		good := c.SQID == 0 && c.CID <= 1 && c.SQHead >= 2 && c.SQHead <= 5
		if good != (err == nil) || err != nil && (!errors.Is(err, ErrProtocol) ||
			ctl.count.ForeignCompletions != 1) {
			t.Fatalf("%+v: %v", c, err)
		}
	})
}

func FuzzCommand(f *testing.F) {
	r := ReadCommand(1, 1, 99, 8, 0x1000, 0)
	f.Add(append([]byte(nil), raw(&r)...))
	f.Add(pattern(64))
	f.Add(pattern(63))
	f.Fuzz(func(t *testing.T, b []byte) {
		c, err := decode[Command](b, "command")
		if (err == nil) != (len(b) >= CommandBytes) {
			t.Fatalf("%d bytes: %v", len(b), err)
		}
		if err != nil {
			return
		}
		lba, n := c.LBARange()
		if n < 1 || n > MaxBlocksPerCommand || uint64(lba) != le64(b, 40) ||
			c.PRP1 != le64(b, 24) || c.LogPageBytes() < 4 || c.LogPageBytes()%4 != 0 {
			t.Fatalf("%+v", c)
		}
		if c.Opcode == OpRead && c.Flags == 0 &&
			c.CDW2|c.CDW3|c.CDW12>>16|c.CDW13|c.CDW14|c.CDW15 == 0 && c.MPTR == 0 {
			if back := ReadCommand(c.CID, c.NSID, lba, n, c.PRP1, c.PRP2); back != c {
				t.Fatalf("%+v does not round trip", c)
			}
		}
	})
}

func FuzzStatus(f *testing.F) {
	for _, s := range []uint16{0, 0x281, 0x4281, 0x7fff, 0x80, 0x10c} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, v uint16) {
		s := Status(v & 0x7fff)
		if back := NewStatus(s.SCT(), s.SC(), s.DNR()); !back.Is(s) || back.DNR() != s.DNR() ||
			back.OK() != s.OK() {
			t.Fatalf("%#x", v)
		}
		if want := fmt.Sprintf("(SCT %Xh, SC %02Xh)", s.SCT(),
			s.SC()); !strings.HasSuffix(s.String(), want) || len(s.Words()) < 5 {
			t.Fatalf("%#x: %s", v, s)
		}
		e := (&StatusError{Bus: "b", Op: "read", Blocks: 1, Status: s}).Error()
		if strings.Contains(e, "not retryable") != s.DNR() || strings.ContainsRune(e, '\n') {
			t.Fatal(e)
		}
	})
}
