package importer

import (
	"fmt"
	"slices"
	"strings"

	"helios/dataset/npy"
	"helios/dataset/pickle"
	"helios/internal/container"
	"helios/internal/errs"
)

const (
	torchBytes = 16 << 20 // of a description of tensors
	torchDepth = 8        // of dictionaries and lists in each other
	torchItems = 1 << 16  // tensors and other values
)

// torchTensors is a file of torch.save: a zip archive of a pickle, which is read as data, and of
// the bytes of the tensors. It can stand for an archive of arrays.
type torchTensors struct {
	archive *npy.Archive
	folder  string // of the archive's members
	items   int
}

// openTorch opens a file of PyTorch: a tensor, or a dictionary or list of tensors, which are called
// by their keys with points between.
func openTorch(path string) (*npy.Archive, error) {
	a, err := npy.OpenArchive(path)
	if err != nil {
		return nil, err
	}
	v, folder, err := torchValue(a)
	if err == nil {
		err = (&torchTensors{archive: a, folder: folder}).add("", v, 0)
	}
	if err == nil && len(a.Names()) == 0 {
		err = errs.New(errs.Usage, "%s holds no tensor but %s", path, pickle.Describe(v))
	}
	if err != nil {
		return nil, closing(err, a)
	}
	return a, nil
}

// torchValue reads the description of what is in the archive, and the folder of its members.
func torchValue(a *npy.Archive) (v any, folder string, err error) {
	names := a.Members()
	i := slices.IndexFunc(names, func(n string) bool { return strings.HasSuffix(n, "/data.pkl") })
	if i < 0 {
		return nil, "", errs.New(errs.Usage, "%s is no file of torch.save: it has no data.pkl", a.Path)
	}
	folder = strings.TrimSuffix(names[i], "data.pkl")
	if slices.Contains(names, folder+"constants.pkl") {
		return nil, "", errs.New(errs.Usage, "%s is a program of TorchScript, which is not run; save its tensors with torch.save",
			a.Path)
	}
	if slices.Contains(names, folder+"byteorder") {
		order, err := a.Read(folder+"byteorder", 16)
		if err != nil {
			return nil, "", err
		}
		if string(order) != "little" {
			return nil, "", errs.New(errs.Usage, "%s has byte order %s; save it again on a machine with little-endian numbers",
				a.Path, brief(string(order)))
		}
	}
	b, err := a.Read(names[i], torchBytes)
	if err != nil {
		return nil, "", err
	}
	v, err = pickle.ParseTorch(a.Path, b, 0)
	return v, folder, err
}

// add adds the tensors in v to the archive. Values may hold each other, so depth and number are
// bounded.
func (t *torchTensors) add(name string, v any, depth int) error {
	if t.items++; t.items > torchItems || depth > torchDepth {
		return errs.New(errs.Usage, "%s holds more than %d values, or %d levels; save the tensors that are wanted in one dict",
			t.archive.Path, torchItems, torchDepth)
	}
	below := func(key any, v any) error {
		k := fmt.Sprint(key)
		if name != "" {
			k = name + "." + k
		}
		return t.add(k, v, depth+1)
	}
	list := func(items []any) error {
		for i, x := range items {
			if err := below(i, x); err != nil {
				return err
			}
		}
		return nil
	}
	switch x := v.(type) {
	case *pickle.Tensor:
		a, err := t.archive.Tensor(name, t.folder+"data/"+x.Storage, x.Offset,
			npy.Header{DType: x.DType, Shape: x.Shape}, x.Strides)
		if err != nil {
			return err
		}
		if !t.archive.Put(name, a) {
			return errs.New(errs.Usage, "%s: %s stands in it twice", t.archive.Path, brief(name))
		}
	case *pickle.Dict:
		for i, k := range x.Keys {
			switch k.(type) {
			case string, int64:
			default:
				return errs.New(errs.Usage, "%s: a key is %s; keys are texts or whole numbers",
					t.archive.Path, pickle.Describe(k))
			}
			if err := below(k, x.Values[i]); err != nil {
				return err
			}
		}
	case *pickle.List:
		return list(x.Items)
	case pickle.Tuple:
		return list(x)
	default:
		t.archive.PutOther(name)
	}
	return nil
}

// openArray opens a file of one array: of NumPy, or of PyTorch with one tensor.
func openArray(path string) (*npy.Array, error) {
	if !container.Is(path, container.Torch) {
		return npy.Open(path)
	}
	a, err := openTorch(path)
	if err != nil {
		return nil, err
	}
	defer a.Close()
	names := a.Names()
	if len(names) != 1 {
		return nil, errs.New(errs.Usage, "%s holds %d tensors (%s); give a file of one, as torch.save(tensor, FILE) writes it",
			path, len(names), briefNames(names))
	}
	one, err := a.Array(names[0])
	if err != nil {
		return nil, err
	}
	return one.Alone(a), nil
}
