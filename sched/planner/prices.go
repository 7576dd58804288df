package planner

import (
	"math"
	"slices"
	"strconv"
	"strings"

	"helios/internal/errs"
	"helios/internal/hardware"
)

// Prices are the costs of things an hour, in any currency.
type Prices map[string]float64

// The things with a price: the whole machine, each GPU, each SSD, each core, each GiB of CPU memory
// that the plan fills.
const (
	priceMachine = "machine"
	priceGPU     = "gpu"
	priceSSD     = "ssd"
	priceCore    = "core"
	priceGiB     = "gib"
)

// Priced are the keys of Prices.
var Priced = []string{priceMachine, priceGPU, priceSSD, priceCore, priceGiB}

// ParsePrices reads prices such as machine=4.1,ssd=0.02.
func ParsePrices(text string) (Prices, error) {
	p := Prices{}
	for _, part := range strings.Split(text, ",") {
		key, value, ok := strings.Cut(strings.TrimSpace(part), "=")
		v, err := strconv.ParseFloat(value, 64)
		if !ok || err != nil || !(v >= 0) || math.IsInf(v, 0) || !slices.Contains(Priced, key) {
			return nil, errs.New(errs.Usage,
				"price %q is not one of %s with a price an hour, such as ssd=0.02", part,
				strings.Join(Priced, ", "))
		}
		if _, twice := p[key]; twice {
			return nil, errs.New(errs.Usage, "price %s is given twice", key)
		}
		p[key] = v
	}
	return p, nil
}

func (p Prices) given() bool { return len(p) > 0 }

// Cost is the cost of a plan, in the prices' currency.
type Cost struct {
	Epoch       float64 `json:"epoch"`
	Preparation float64 `json:"preparation"`
	Hour        float64 `json:"hour"` // of all that has a price
}

// of is the cost of a plan.
func (p Prices) of(x *Plan, hw *hardware.Profile) *Cost {
	memory := int64(0)
	for _, n := range x.CPUMemory {
		memory += n
	}
	hour := p[priceMachine] + p[priceGPU] + p[priceSSD]*float64(x.SSDs) +
		p[priceCore]*hw.CPU.Cores.Value + p[priceGiB]*float64(memory)/(1<<30)
	return &Cost{Hour: hour, Epoch: hour * x.Seconds / 3600,
		Preparation: hour * x.Preparation.Sum() / 3600}
}
