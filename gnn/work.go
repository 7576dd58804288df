package gnn

// BlockShape is the size of a sampled block: destinations, sources and edges. In a typed graph
// Relations has those of each relation; a type's nodes are sources of all relations from it.
type BlockShape struct {
	Dst, Src, Edges int64
	Relations       []BlockShape
}

// WorkKind is the resource that bounds a kernel.
type WorkKind int

const (
	WorkLaunch      WorkKind = iota // nothing but the launch
	WorkGather                      // rows from all over memory
	WorkProduct                     // a product of matrices
	WorkElementwise                 // memory in order
)

// Work holds a kernel's demands on a device.
type Work struct {
	Kind         WorkKind
	Items, Bytes int64
	Flops        float64
}

// gatherWork reads the rows at both ends of a block's edges.
func gatherWork(edges, rows, dim int64) Work {
	return Work{Kind: WorkGather, Items: edges, Bytes: 4 * dim * (edges + rows)}
}

// productWork multiplies m×k by k×n, pairs times into one result.
func productWork(m, n, k, pairs int64) Work {
	return Work{
		Kind: WorkProduct, Flops: 2 * float64(m) * float64(n) * float64(k) * float64(pairs),
		Bytes: 4 * ((m*k+k*n)*pairs + m*n),
	}
}

func bytesWork(n int64) Work { return Work{Kind: WorkElementwise, Bytes: n} }

// transposeWork turns a block round: fill, count, scan, fill.
func transposeWork(b BlockShape) []Work {
	return []Work{bytesWork(4 * b.Src), bytesWork(8 * b.Edges), {}, bytesWork(12 * b.Edges)}
}

// LayerForward lists the kernels of layer l over a block: those of its Arch, and of what follows
// it. The configuration is one that CheckKind takes.
func (c *ModelConfig) LayerForward(l int, b BlockShape) []Work {
	arch, err := ArchOf(c.Model)
	if err != nil {
		return nil
	}
	return append(arch.Forward(c, l, b), c.betweenWork(l, b, false)...)
}

// LayerBackward is LayerForward for the gradients.
func (c *ModelConfig) LayerBackward(l int, b BlockShape) []Work {
	arch, err := ArchOf(c.Model)
	if err != nil {
		return nil
	}
	return append(c.betweenWork(l, b, true), arch.Backward(c, l, b)...)
}

// LayerFloats counts the parameters of layer l, those of a head with the last one's.
func (c *ModelConfig) LayerFloats(l int) int64 {
	arch, err := ArchOf(c.Model)
	if err != nil {
		return 0
	}
	n := arch.Floats(c, l)
	for _, kind := range c.kinds() {
		if c.residual() && c.projects(l, kind) {
			n += c.kindWidth(l, kind) * c.width(l+1)
		}
		if c.ResidualLinear {
			n += c.width(l + 1)
		}
		if norm, _ := NormOf(c.Norm); norm != nil && !c.bare(l) {
			n += 2 * c.width(l+1)
		}
	}
	if in := c.width(l + 1); l == c.Layers-1 && c.headed() {
		if n += (in + 1) * int64(c.Classes); c.Head == headMLP {
			n += in*in + 3*in
		}
	}
	return n
}

// betweenWork is that of the residual connection, the normalisation and the activation of layer l,
// which a fused model does not have.
func (c *ModelConfig) betweenWork(l int, b BlockShape, backward bool) []Work {
	in, out := c.width(l), c.width(l+1)
	rows := func(matrices, width int64) Work { return bytesWork(matrices * 4 * b.Dst * width) }
	var w []Work
	matrix := in != out || c.ResidualLinear
	if c.residual() && (!backward || l > 0) {
		if matrix {
			w = append(w, productWork(b.Dst, out, in, 1))
		}
		w = append(w, rows(3, out))
	}
	if c.residual() && backward && matrix {
		w = append(w, productWork(in, out, b.Dst, 1))
	}
	norm, _ := NormOf(c.Norm)
	if l == c.Layers-1 && c.headed() {
		w = append(w, c.headWork(b.Dst, backward)...)
	}
	if c.bare(l) || norm == nil && !c.residual() && c.Head != headMLP &&
		(c.Activation == "" || c.Activation == DefaultActivation) {
		return w
	}
	if norm != nil {
		w = append(w, norm.work(b.Dst, out, backward)...)
	}
	if backward {
		return append(w, rows(3, out))
	}
	return append(w, rows(2, out))
}

// headWork is that of a head over so many rows.
func (c *ModelConfig) headWork(rows int64, backward bool) (w []Work) {
	in, out := int64(c.Hidden), int64(c.Classes)
	widths := []int64{out}
	if c.Head == headMLP {
		widths = append(widths, in)
		w = append(batchNorm{}.work(rows, in, backward), bytesWork(2*4*rows*in))
	}
	for _, out := range widths {
		if w = append(w, productWork(rows, out, in, 1)); backward {
			w = append(w, productWork(in, out, rows, 1))
		}
	}
	return w
}
