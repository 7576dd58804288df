package nvme

import "fmt"

// AsyncEvent holds what an Asynchronous Event Request completed with (section 5.2). The
// controller holds back further events of the same type until log page LogPage is read
// (SMART and ErrorLog do for theirs).
type AsyncEvent struct {
	Type    uint8
	Info    uint8
	LogPage uint8
}

// Asynchronous event types (figure 145).
const (
	EventError  = 0
	EventSMART  = 1
	EventNotice = 2
	EventIO     = 6
	EventVendor = 7
)

func decodeEvent(dw0 uint32) AsyncEvent {
	return AsyncEvent{Type: uint8(dw0 & 7), Info: uint8(dw0 >> 8), LogPage: uint8(dw0 >> 16)}
}

// DW0 is the completion dword that carries the event.
func (e AsyncEvent) DW0() uint32 {
	return uint32(e.Type&7) | uint32(e.Info)<<8 | uint32(e.LogPage)<<16
}

var eventWords = map[uint16]string{
	0x000: "write to an invalid doorbell register",
	0x001: "invalid doorbell write value",
	0x002: "diagnostic failure",
	0x003: "persistent internal error",
	0x004: "transient internal error",
	0x005: "firmware image load error",
	0x100: "NVM subsystem reliability degraded",
	0x101: "temperature threshold crossed",
	0x102: "available spare below its threshold",
	0x200: "namespace attribute changed",
	0x201: "firmware activation starting",
	0x202: "telemetry log changed",
	0x203: "asymmetric namespace access change",
	0x204: "predictable latency event aggregate log change",
	0x205: "LBA status information alert",
	0x206: "endurance group event aggregate log change",
	0x600: "reservation log page available",
	0x601: "sanitize operation completed",
	0x602: "sanitize operation completed with unexpected deallocation",
}

// String gives the event in words, with the log page that says more.
func (e AsyncEvent) String() string {
	w, ok := eventWords[uint16(e.Type)<<8|uint16(e.Info)]
	if !ok {
		switch e.Type {
		case EventError:
			w = "unknown error event"
		case EventSMART:
			w = "unknown health event"
		case EventNotice:
			w = "unknown notice"
		case EventVendor:
			w = "vendor specific event"
		default:
			w = "unknown event"
		}
	}
	return fmt.Sprintf("%s (type %Xh, info %02Xh, log page %02Xh)", w, e.Type, e.Info, e.LogPage)
}
