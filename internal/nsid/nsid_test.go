package nsid

import (
	"testing"

	"github.com/stretchr/testify/require"
)

func TestSame(t *testing.T) {
	const uuid, nguid, eui = "c0ffee00-1111-2222-3333-444455556666",
		"0102030405060708090a0b0c0d0e0f10", "00 a0 98 11 22 33 44 55"
	make := func(nqn, serial string, nsid uint32, private bool, ids ...string) ID {
		id := ID{NQN: nqn, Serial: serial, Model: "M", NSID: nsid, Private: private}
		for _, s := range ids {
			id.AddHex(s)
		}
		return id
	}
	for _, c := range []struct {
		name string
		a, b ID
		want bool
	}{
		{"one UUID", make("q", "s", 1, false, uuid), make("q", "s", 1, false, uuid), true},
		{"one UUID of several IDs", make("q", "s", 1, false, uuid, eui),
			make("q", "s", 1, false, uuid), true},
		{"sysfs without hyphens", make("q", "s", 1, false, "C0FFEE0011112222333344445555 6666"),
			make("q", "s", 1, false, uuid), true},
		{"one EUI-64", make("", "", 0, false, eui), make("", "", 0, false, eui), true},
		{"a dispersed namespace: two subsystems, one NGUID", make("q", "s", 1, false, nguid),
			make("r", "t", 7, false, nguid), true},
		{"other UUIDs in one subsystem", make("q", "s", 1, false, uuid),
			make("q", "s", 1, false, nguid), false},
		{"NQN and NSID", make("q", "s", 1, false), make("q", "s", 1, false, uuid), true},
		{"NQN and another NSID", make("q", "s", 1, false), make("q", "s", 2, false), false},
		{"an NSID that is not known", make("q", "s", 0, false), make("q", "s", 2, false), true},
		{"no NQN, one serial number", make("", "s", 1, false), make("q", "s", 1, false), true},
		{"no NQN, other serial numbers", make("", "s", 1, false), make("", "t", 1, false), false},
		{"nothing known", ID{}, ID{}, false},
		{"zeros are no ID", make("q", "s", 1, false, "00000000-0000-0000-0000-000000000000"),
			make("r", "t", 1, false, "0000000000000000"), false},
		{"one NGUID for all SSDs of a make", make("q", "s", 1, true, nguid),
			make("q", "t", 1, true, nguid), false},
		{"private, but the same SSD", make("q", "s", 1, true, nguid),
			make("q", "s", 1, true, nguid), true},
		{"private by one side's word", make("q", "s", 1, true, nguid),
			make("q", "t", 1, false, nguid), false},
	} {
		require.Equal(t, c.want, c.a.Same(c.b), c.name)
		require.Equal(t, c.want, c.b.Same(c.a), c.name+", the other way round")
	}
}
