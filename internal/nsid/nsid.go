// Package nsid recognises paths that lead to one NVMe namespace. A namespace that several
// controllers reach has a name for each of them, and may be a disk of the kernel's and an SSD of
// ours at once.
package nsid

import (
	"encoding/hex"
	"fmt"
	"slices"
	"strings"
)

// ID is the identity of a namespace, the same through every controller that reaches it.
type ID struct {
	NQN    string `json:"nqn,omitempty"`    // of the NVM subsystem; "" before NVMe 1.2.1
	Serial string `json:"serial,omitempty"` // of the NVM subsystem
	Model  string `json:"model,omitempty"`
	NSID   uint32 `json:"nsid,omitempty"` // 0: not known
	// IDs are its UUID, NGUID and EUI-64, those that it has, in hexadecimal.
	IDs []string `json:"ids,omitempty"`
	// Private says that its controller reports it as one that no other controller reaches.
	Private bool `json:"private,omitempty"`
}

// AddHex adds a UUID, NGUID or EUI-64 as sysfs writes it, with or without separators. All zeros is
// none.
func (id *ID) AddHex(text string) {
	b, err := hex.DecodeString(strings.NewReplacer("-", "", " ", "").Replace(strings.ToLower(text)))
	if err == nil {
		id.Add(b)
	}
}

// Add adds a UUID, NGUID or EUI-64. All zeros is none.
func (id *ID) Add(b []byte) {
	text := hex.EncodeToString(b)
	if (len(b) != 8 && len(b) != 16) || strings.Trim(text, "0") == "" ||
		slices.Contains(id.IDs, text) {
		return
	}
	id.IDs = append(id.IDs, text)
}

// Same reports whether both are one namespace. In doubt they are.
//
// UUID, NGUID and EUI-64 are unique in the world, an NSID in its subsystem (NVMe Base Specification
// 2.0, section 4.5). Some makes give all their SSDs one NGUID or one NQN: those say that their
// namespaces are private, and have serial numbers of their own.
func (id ID) Same(other ID) bool {
	serials := id.Serial != "" && other.Serial != ""
	if (id.Private || other.Private) && serials && id.Serial != other.Serial {
		return false
	}
	if len(id.IDs) > 0 && len(other.IDs) > 0 {
		return slices.ContainsFunc(id.IDs,
			func(s string) bool { return slices.Contains(other.IDs, s) })
	}
	if id.NSID != other.NSID && id.NSID != 0 && other.NSID != 0 {
		return false
	}
	if id.NQN != "" && other.NQN != "" {
		return id.NQN == other.NQN
	}
	return serials && id.Serial == other.Serial && id.Model == other.Model
}

// Keys are texts of which two paths to one namespace have one in common.
func (id ID) Keys() []string {
	var out []string
	for _, s := range id.IDs {
		out = append(out, "namespace "+s)
	}
	if len(out) == 0 && id.NQN+id.Serial != "" {
		out = append(out, fmt.Sprintf("namespace %d of %s %s %s", id.NSID, id.NQN, id.Serial,
			id.Model))
	}
	return out
}

// String shows the identity in a message.
func (id ID) String() string {
	if len(id.IDs) > 0 {
		return id.IDs[0]
	}
	of := id.NQN
	if of == "" {
		of = "serial " + id.Serial
	}
	return fmt.Sprintf("namespace %d of %s", id.NSID, of)
}
