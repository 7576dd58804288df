package build

import (
	"cmp"
	"strconv"

	"helios/internal/errs"
	"helios/internal/philox"
)

// Communities with hubs: a graph whose parts are clean and yet do not suffice. Nodes form groups,
// and most of a node's neighbours are of its own group, so a partitioner finds the groups and cuts
// few edges. The features of a node say next to nothing of its class. Those of a few hubs do, which
// lie in all groups, and everybody has some among its neighbours. Sampling within parts alone
// loses most hubs with the edges that are cut; who keeps the nodes of the highest out-degree in
// memory, which are the hubs, loses none.
//
// Hubs have neighbours, too. Where those are nodes of their group (the default), a hub that stays
// in memory without its group has a list there that lacks most of it, and the rest are other hubs:
// it says more of the class than the whole list. Where hubs know hubs (HubPeers 1), as in the rich
// clubs of Zhou and Mondragon (IEEE Communications Letters 8(3), 2004), its list stays whole.

// CommunityOptions shape a graph of kind "communities". Zero values mean the defaults.
type CommunityOptions struct {
	// Count is the number of communities, of nearly equal size (64, and fewer where the nodes would
	// not give each of them four nodes of each class).
	Count     int     `option:"communities" positive:"yes" shown:"64" arg:"NUMBER" usage:"communities: NUMBER of groups of nodes that know each other"`
	Mixing    float64 `option:"mixing" share:"yes" positive:"yes" shown:"0.05" usage:"communities: share of neighbours, hubs aside, from other groups"`
	Hubs      float64 `option:"hubs" share:"yes" positive:"yes" shown:"0.005" usage:"communities: share of the nodes that are hubs"`
	HubEdges  float64 `option:"hub-edges" share:"yes" positive:"yes" shown:"0.1" usage:"communities: share of neighbours that are hubs, of any group"`
	HubPeers  float64 `option:"hub-peers" share:"yes" positive:"yes" shown:"{hub-edges}" usage:"communities: share of a hub's neighbours that are hubs, of any group"`
	HubSignal float64 `option:"hub-signal" positive:"yes" shown:"3" usage:"communities: {signal} for hubs"`
}

func (c *CommunityOptions) fill(o *GenerateOptions) error {
	c.Mixing, c.Hubs = cmp.Or(c.Mixing, 0.05), cmp.Or(c.Hubs, 0.005)
	c.HubEdges, c.HubSignal = cmp.Or(c.HubEdges, 0.1), cmp.Or(c.HubSignal, 3)
	c.HubPeers = cmp.Or(c.HubPeers, c.HubEdges)
	c.Count = cmp.Or(c.Count, int(max(min(64, o.Nodes/int64(4*o.Classes)), 1)))
	if c.Count < 1 || int64(c.Count) > o.Nodes {
		return errs.New(errs.Usage, "{communities} %d is outside 1..%d ({nodes})",
			c.Count, o.Nodes)
	}
	for _, x := range []struct {
		name     string
		v, limit float64
	}{{"mixing", c.Mixing, 1}, {"hubs", c.Hubs, 1}, {"hub-edges", c.HubEdges, 1},
		{"hub-peers", c.HubPeers, 1}, {"hub-signal", c.HubSignal, 1000}} {
		if !(x.v >= 0.000001 && x.v <= x.limit) { // NaN, too
			return errs.New(errs.Usage, "%v %g is outside 0.000001..%g", errs.Key(x.name), x.v,
				x.limit)
		}
	}
	return nil
}

func (c *CommunityOptions) record(options map[string]string) {
	options["communities"] = strconv.Itoa(c.Count)
	for name, v := range map[string]float64{"mixing": c.Mixing, "hubs": c.Hubs,
		"hub-edges": c.HubEdges, "hub-signal": c.HubSignal} {
		options[name] = formatFloat(v)
	}
	if c.HubPeers != c.HubEdges {
		options["hub-peers"] = formatFloat(c.HubPeers)
	}
}

// hubs is the number of hubs, which are the first ranks.
func (g *generator) hubs() int64 {
	n := int64(float64(g.Communities.Hubs * float64(g.Nodes)))
	return min(max(n, int64(g.Classes)), g.Nodes)
}

// Hubs have the first ranks, their classes in turn. The others follow: their communities in turn,
// and within a community their classes.

// placeOf is the class of a rank and its community. Hubs have communities too, whose nodes are
// their neighbours.
func (g *generator) placeOf(rank int64) (class, community int64) {
	classes, count, hubs := int64(g.Classes), int64(g.Communities.Count), g.hubs()
	if rank < hubs {
		return rank % classes, rank / classes % count
	}
	rank -= hubs
	return rank / count % classes, rank % count
}

// far is the factor by which the centre of a rank's features is further from the origin than those
// of its class are in general.
func (g *generator) far(rank int64) float32 {
	if g.Kind == kindCommunities && rank < g.hubs() {
		return float32(g.Communities.HubSignal / g.Signal)
	}
	return 1
}

// community draws the in-neighbours of a node: hubs of all communities, and others of its own.
func (g *generator) community(id int64, dst []int64) []int64 {
	c, classes, hubs := g.Communities, int64(g.Classes), g.hubs()
	count, others := int64(c.Count), g.Nodes-hubs
	own, home := g.placeOf(g.rank(id))
	share := c.HubEdges
	if g.rank(id) < hubs {
		share = c.HubPeers
	}
	return g.draw(id, dst, func(i uint32) int64 {
		w, x := g.words(uint64(id), i, genNeighbor), g.words(uint64(id), i, genHub)
		class := g.classOf(own, w[0], w[1])
		pick := func(first, step, end int64) int64 { // of those a step apart
			size := (end - first + step - 1) / step
			if size < 1 {
				return -1
			}
			return first + step*min(int64(float64(size)*unit(w[2], w[3])), size-1)
		}
		if unit(x[0], 0) < share {
			return pick(class, classes, hubs)
		}
		of := home
		if count > 1 && unit(x[1], 0) < c.Mixing {
			of = (home + 1 + int64(philox.Bounded(uint64(x[2])<<32, uint64(count-1)))) % count
		}
		rank := pick(of+count*class, count*classes, others)
		if rank < 0 {
			return rank
		}
		return hubs + rank
	})
}
