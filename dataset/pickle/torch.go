package pickle

import "helios/dataset/npy"

// Tensor is a tensor as torch.save describes it: elements of a storage, which is a file of its own
// in the archive.
type Tensor struct {
	Storage string // the file's name in the folder data
	DType   npy.DType
	Offset  int64 // elements before the first
	Shape   []int64
	Strides []int64 // elements from one to the next, by dimension
}

type (
	// torchType is the type of a storage or of a tensor; bytes without a type have size 0.
	torchType npy.DType
	storage   struct {
		of  torchType
		key string
	}
)

// Names that files of PyTorch use beside those of types.
const (
	fnTensor     global = 100 + iota // (storage, offset, shape, strides, gradient, hooks[, bits])
	fnTensorOf                       // the same with the type behind the hooks
	fnParameter                      // (tensor, gradient, hooks)
	classOrdered                     // ()
)

var torchGlobals = map[string]any{
	"torch._utils _rebuild_tensor_v2": fnTensor,
	"torch._utils _rebuild_tensor_v3": fnTensorOf,
	"torch._utils _rebuild_parameter": fnParameter,
	"collections OrderedDict":         classOrdered,
	"torch BoolStorage":               torchType{Kind: 'b', Size: 1},
	"torch ByteStorage":               torchType{Kind: 'u', Size: 1},
	"torch CharStorage":               torchType{Kind: 'i', Size: 1},
	"torch ShortStorage":              torchType{Kind: 'i', Size: 2},
	"torch IntStorage":                torchType{Kind: 'i', Size: 4},
	"torch LongStorage":               torchType{Kind: 'i', Size: 8},
	"torch HalfStorage":               torchType{Kind: 'f', Size: 2},
	"torch BFloat16Storage":           torchType(npy.BFloat16),
	"torch FloatStorage":              torchType{Kind: 'f', Size: 4},
	"torch DoubleStorage":             torchType{Kind: 'f', Size: 8},
	"torch.storage UntypedStorage":    torchType{},
	"torch uint16":                    torchType{Kind: 'u', Size: 2},
	"torch uint32":                    torchType{Kind: 'u', Size: 4},
	"torch uint64":                    torchType{Kind: 'u', Size: 8},
}

// ParseTorch reads data.pkl of a file of PyTorch: what Parse returns may hold *Tensor. Nothing but
// tensors, parameters, and what holds them is known.
func ParseTorch(name string, b []byte, memory int64) (any, error) {
	p := newParser(name, b, memory)
	p.torch = true
	return p.run()
}

// torchGlobal takes a name that a file of PyTorch uses.
func (p *parser) torchGlobal(name string) {
	g, ok := torchGlobals[name]
	if !ok && p.err == nil {
		p.fail(
			"the file holds an object of %.80q, and no code of a file is run; save tensors or a dict of them, as torch.save(data.to_dict(), FILE) does, or call helios.save(OUT, data) in Python",
			name)
	}
	p.push(g)
}

// persistent takes ("storage", type, key, device, elements).
func (p *parser) persistent() {
	t, ok := p.pop().(Tuple)
	if !ok || len(t) != 5 || t[0] != any("storage") {
		p.fail("a storage is not described as PyTorch does it")
		return
	}
	of, ok1 := t[1].(torchType)
	key, ok2 := t[2].(string)
	if !ok1 || !ok2 {
		p.fail("a storage is not described as PyTorch does it")
		return
	}
	p.push(&storage{of, key})
}

// callTorch makes what fn stands for; nil where the arguments are others.
func (p *parser) callTorch(fn global, args Tuple) any {
	switch {
	case fn == classOrdered && len(args) == 0:
		return &Dict{}
	case fn == fnParameter && len(args) == 3:
		if t, ok := args[0].(*Tensor); ok {
			return t
		}
	case fn == fnTensor && (len(args) == 6 || len(args) == 7):
		return p.tensor(args[:6], nil, args[6:])
	case fn == fnTensorOf && (len(args) == 7 || len(args) == 8):
		if of, ok := args[6].(torchType); ok {
			return p.tensor(args[:6], &of, args[7:])
		}
	}
	return nil
}

// tensor makes a tensor; bits are those of PyTorch's conjugated or negated views, which stand for
// other values than the storage holds.
func (p *parser) tensor(args Tuple, of *torchType, bits Tuple) any {
	s, ok1 := args[0].(*storage)
	offset, ok2 := args[1].(int64)
	shape, ok3 := args[2].(Tuple)
	strides, ok4 := args[3].(Tuple)
	if !ok1 || !ok2 || !ok3 || !ok4 || len(shape) != len(strides) || len(shape) > 64 {
		return nil
	}
	if len(bits) > 0 && bits[0] != nil {
		if d, ok := bits[0].(*Dict); !ok || len(d.Keys) > 0 {
			p.fail("a tensor is a view that negates its values or the like; save tensor.resolve_neg().clone()")
			return nil
		}
	}
	t := &Tensor{Storage: s.key, DType: npy.DType(s.of), Offset: offset}
	if of != nil {
		t.DType = npy.DType(*of)
	}
	if t.DType.Size == 0 || !p.charge(16*int64(len(shape))) {
		return nil
	}
	for i := range shape {
		n, ok1 := shape[i].(int64)
		step, ok2 := strides[i].(int64)
		if !ok1 || !ok2 || n < 0 || step < 0 {
			return nil
		}
		t.Shape, t.Strides = append(t.Shape, n), append(t.Strides, step)
	}
	return t
}
