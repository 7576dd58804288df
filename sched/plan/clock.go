package plan

// The clocks of a run.
const (
	ClockWall    = "wall"
	ClockVirtual = "virtual" // modelled
)

// Clocks lists the accepted values.
var Clocks = []string{ClockWall, ClockVirtual}
