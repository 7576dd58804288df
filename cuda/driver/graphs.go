package driver

import (
	"fmt"
	"slices"
	"strings"
	"unsafe"

	"helios/cuda"
)

// A sequence of launches that comes again is made a graph: then a step of training costs one launch
// and an update of each node's parameters, without the events and the driver's work for each
// kernel. Where a graph cannot be used the run costs launches: without memory for it, or in a green
// context, the steps are launched one by one.

const (
	mostGraphs  = 8   // of one stream; the one that was not used for longest makes room
	leastSteps  = 3   // below that a graph saves nothing
	mostSteps   = 512 // so that one launch does not fill the driver's queue
	graphAgain  = 256 // after how many uses a graph that could not be made is tried again
	worthAGraph = 2   // uses of a sequence
)

// stepGraph is a sequence of kernels that has come before.
type stepGraph struct {
	steps []*kernel
	label *kernel // the kernel that errors name
	uses  int
	skip  int // uses without a graph, after it could not be made
	last  uint64
	g     graph
	x     graphExec
	nodes []graphNode
}

// graphCache is a stream's graphs. An executable graph runs one launch at a time (cuGraphLaunch),
// and so does a stream. The stream's mutex guards it.
type graphCache struct {
	list []*stepGraph
	tick uint64
}

var _ cuda.StepLauncher = (*gpuStream)(nil)

// find returns the entry of a sequence, and makes it. It runs within enter.
func (c *graphCache) find(d *Device, steps []*kernel) *stepGraph {
	c.tick++
	for _, e := range c.list {
		if slices.Equal(e.steps, steps) {
			e.uses++
			e.last = c.tick
			return e
		}
	}
	if len(c.list) >= mostGraphs {
		i := 0
		for j, e := range c.list {
			if e.last < c.list[i].last {
				i = j
			}
		}
		c.list[i].close(d)
		c.list = slices.Delete(c.list, i, i+1)
	}
	e := &stepGraph{steps: steps, uses: 1, last: c.tick}
	names := []string{steps[0].name, steps[len(steps)-1].name}
	e.label = &kernel{d: d, name: fmt.Sprintf("%s (%d kernels of a graph)",
		strings.Join(names, " … "), len(steps))}
	c.list = append(c.list, e)
	return e
}

// close ends a graph; a launch of it that still runs is finished (cuGraphExecDestroy). It runs
// within enter.
func (e *stepGraph) close(d *Device) {
	if e.x != 0 {
		d.api.GraphExecDestroy(e.x)
	}
	if e.g != 0 {
		d.api.GraphDestroy(e.g)
	}
	e.x, e.g, e.nodes = 0, 0, nil
}

func (c *graphCache) close(d *Device) {
	for _, e := range c.list {
		e.close(d)
	}
	c.list = nil
}

// LaunchSteps implements cuda.StepLauncher.
func (s *gpuStream) LaunchSteps(q *cuda.Steps) error {
	n := len(q.List)
	if n >= leastSteps && n <= mostSteps && s.green == nil && s.d.caps.Graphs {
		done, err := s.launchGraph(q)
		if done || err != nil {
			return err
		}
	}
	return cuda.LaunchEach(s, q)
}

// launchGraph enqueues all of q as a graph, or nothing: then done is false.
func (s *gpuStream) launchGraph(q *cuda.Steps) (done bool, err error) {
	steps := make([]*kernel, len(q.List))
	for i := range q.List {
		st := &q.List[i]
		if steps[i], err = s.launchable(st.Kernel, st.Config,
			unsafe.Pointer(unsafe.SliceData(st.Params)), uintptr(len(st.Params))); err != nil {
			return false, err
		}
	}
	if err := s.lock(); err != nil {
		return false, err
	}
	defer s.mu.Unlock()
	if err := s.room(len(steps) + launchLoad); err != nil {
		return false, err
	}
	d := s.d
	if err := d.enter(); err != nil {
		return false, err
	}
	defer d.leave()
	e := s.graphs.find(d, steps)
	if e.uses < worthAGraph {
		return false, nil
	}
	if e.skip > 0 {
		e.skip--
		return false, nil
	}
	// refused continues without the graph, unless the device is gone.
	refused := func(call string, r result) (bool, error) {
		err := d.failed(call, r)
		e.close(d)
		e.skip = graphAgain
		if d.lost.Load() != nil {
			return false, err
		}
		return false, nil
	}
	if call, r := s.fillGraph(e, q); r != success {
		return refused(call, r)
	}
	return s.startGraph(e, refused)
}

// startGraph launches a filled graph. refused decides about a launch that the driver refuses.
func (s *gpuStream) startGraph(e *stepGraph, refused func(call string, r result) (bool, error)) (
	done bool, err error) {
	m, err := s.openMark()
	if err == nil {
		if r := s.d.api.GraphLaunch(e.x, s.h); r != success {
			return refused("cuGraphLaunch", r)
		}
		n := len(e.steps)
		if err = s.closeMark(m, e.label, e.steps, n, n+launchLoad); err == nil {
			return true, s.reapHalf()
		}
		done = true
	}
	err = fmt.Errorf("stream %q: launch of %s: %w", s.opt.Name, e.label.name, err)
	if done {
		s.setErr(err)
	}
	return done, err
}

// fillGraph makes the graph, or gives its nodes these parameters: of later launches only
// (cuGraphExecKernelNodeSetParams). Each node has its launch's number, by which a fault finds its
// kernel. s.mu is held, and it runs within enter.
func (s *gpuStream) fillGraph(e *stepGraph, q *cuda.Steps) (call string, r result) {
	a := s.d.api
	fresh := e.x == 0
	if fresh {
		if e.g, r = a.GraphCreate(); r != success {
			e.g = 0
			return "cuGraphCreate", r
		}
	}
	node := &s.args.node
	var after graphNode
	for i := range q.List {
		st := &q.List[i]
		s.setParams(unsafe.Pointer(unsafe.SliceData(st.Params)), uintptr(len(st.Params)),
			s.seq+1+uint64(i))
		*node = nodeParams{
			Func: e.steps[i].fn, GridX: uint32(st.Config.Blocks), GridY: 1, GridZ: 1,
			BlockX: uint32(st.Config.Threads), BlockY: 1, BlockZ: 1,
			Params: &s.args.params[0],
		}
		if fresh {
			if after, r = a.GraphAddKernelNode(e.g, after, node); r != success {
				return "cuGraphAddKernelNode_v2", r
			}
			e.nodes = append(e.nodes, after)
		} else if r = a.GraphExecKernelNodeSetParams(e.x, e.nodes[i], node); r != success {
			return "cuGraphExecKernelNodeSetParams_v2", r
		}
	}
	if fresh {
		if e.x, r = a.GraphInstantiate(e.g); r != success {
			e.x = 0
			return "cuGraphInstantiateWithFlags", r
		}
	}
	return "", success
}
