package nvme

import (
	"testing"

	"helios/internal/errs"
)

func TestSQPlace(t *testing.T) {
	for _, p := range []SQPlace{SQHost, SQCMB, SQAuto} {
		if q, err := ParseSQPlace(p.String()); err != nil || q != p {
			t.Errorf("%v: %v %v", p, q, err)
		}
	}
	if _, err := ParseSQPlace("gpu"); errs.ClassOf(err) != errs.Usage {
		t.Error(err)
	}
	if _, err := Open(t.Context(), newFake(), Options{SQ: 7}); errs.ClassOf(err) != errs.Usage {
		t.Error(err)
	}
}

func TestCMBRegisters(t *testing.T) {
	// 3 units of 1 MiB, submission queues only, in BAR 4 from the second unit on.
	size, at := CMBSZ(3<<12|2<<8|1), CMBLOC(2<<12|4)
	if size.Unit() != 1<<20 || size.Bytes() != 3<<20 || !size.SQS() || at.BIR() != 4 ||
		at.OFST()*size.Unit() != 2<<20 {
		t.Errorf("%d %d %v %d %d", size.Unit(), size.Bytes(), size.SQS(), at.BIR(), at.OFST())
	}
	if b := CMBSZ(1<<12 | 7<<8).Bytes(); b != 0 {
		t.Errorf("a reserved unit gives %d bytes", b)
	}
	if !CAP(1<<57).CMBS() || CAP(0).CMBS() {
		t.Error("CAP.CMBS")
	}
	b := CMB{Addr: 0x10000, Bytes: 0x3000}
	for _, c := range []struct {
		a    IOVA
		n    int64
		want bool
	}{{0x10000, 0x3000, true}, {0x12000, 0x1000, true}, {0x12000, 0x1001, false},
		{0xffff, 1, false}, {0x13000, 1, false}, {0x10000, 0x3001, false}} {
		if b.Contains(c.a, c.n) != c.want {
			t.Errorf("%#x+%#x: %v", uint64(c.a), c.n, !c.want)
		}
	}
}

func TestCMBAllocator(t *testing.T) {
	m := &cmbMemory{CMB: CMB{Bytes: 8 * 4096}, used: make([]bool, 8)}
	take := func(n, at int) cmbPages {
		t.Helper()
		p, ok := m.alloc(n)
		if ok != (at >= 0) || ok && p != (cmbPages{at, n}) {
			t.Fatalf("%d pages: %+v %v, want them at %d", n, p, ok, at)
		}
		return p
	}
	a, b, c := take(2, 0), take(3, 2), take(2, 5)
	take(2, -1)
	take(1, 7)
	take(1, -1)
	m.free(b)
	take(4, -1)
	take(3, 2)
	m.free(a)
	m.free(c)
	if m.left() != 4*4096 {
		t.Errorf("%d bytes left", m.left())
	}
	take(3, -1) // four are free, but not in a row
	take(2, 0)
}
