package nvme

import "testing"

func TestCMBRegisters(t *testing.T) {
	// 3 units of 1 MiB, in BAR 4 from the second unit on.
	size, loc := CMBSZ(3<<12|2<<8|1), CMBLOC(2<<12|4)
	if size.Unit() != 1<<20 || size.Bytes() != 3<<20 || loc.BIR() != 4 ||
		loc.OFST()*size.Unit() != 2<<20 {
		t.Errorf("%d %d %d %d", size.Unit(), size.Bytes(), loc.BIR(), loc.OFST())
	}
	if b := CMBSZ(1<<12 | 7<<8).Bytes(); b != 0 {
		t.Errorf("a reserved unit gives %d bytes", b)
	}
	if !CAP(1<<57).CMBS() || CAP(0).CMBS() {
		t.Error("CAP.CMBS")
	}
}
