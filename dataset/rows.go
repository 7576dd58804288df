package dataset

import (
	"errors"
	"fmt"
	"path"

	"helios/dataset/npy"
	"helios/internal/errs"
	"helios/internal/rowtype"
	"helios/internal/simd"
)

// float16DType is the type of features.npy in a dataset of float16.
var float16DType = npy.DType{Kind: 'f', Size: 2}

// RowType is the form in which the dataset's own rows are: float32 or float16. Those on SSDs may be
// of another one (Attached).
func (m *Meta) RowType() rowtype.Type {
	if m.DType == rowtype.Float16.String() {
		return rowtype.Float16
	}
	return rowtype.Float32
}

// RowBytes is the size of one stored row of the dataset's own type.
func (m *Meta) RowBytes() int { return m.RowType().RowBytes(m.Dim) }

// Stored returns the rows that a run finds, and their features. Where no type has rows that is one
// row of one zero, which nobody reads.
func (m *Meta) Stored() (rows int64, dim int) { return max(m.Rows(), 1), max(m.Dim, 1) }

// checkDType checks dataset.yaml.
func (m *Meta) checkDType() error {
	if m.DType != m.RowType().String() {
		return fmt.Errorf("dtype %q is unknown; features are float32 or float16", m.DType)
	}
	if m.FeatureFn != "" && m.RowType() != rowtype.Float32 {
		return fmt.Errorf("feature_fn %s makes float32 rows, dtype says %s", m.FeatureFn, m.DType)
	}
	return nil
}

// FileDType returns what features.npy must hold.
func (m *Meta) FileDType() npy.DType {
	if m.RowType() == rowtype.Float16 {
		return float16DType
	}
	return npy.Float32
}

// ReadRows reads the feature rows first, first+1, … from features.npy, or computes them, into dst,
// whose length must be a whole number of rows (Meta.RowBytes each, of Meta.RowType). Rows of format
// 2 are those of one type after the other; narrow ones end in zeros.
func (d *Dataset) ReadRows(first int64, dst []byte) error {
	row, rows := int64(d.Meta.RowBytes()), d.Meta.Rows()
	n := int64(len(dst)) / row
	if int64(len(dst))%row != 0 || first < 0 || first+n > rows {
		return fmt.Errorf("%s: rows %d..%d (%d bytes) are not rows of %d bytes in 0..%d",
			d.RowSource(), first, first+n-1, len(dst), row, rows-1)
	}
	if fn := d.FeatureFunc(); fn != nil {
		fn.rows(first, dst)
		return nil
	}
	g := d.Meta.Graph()
	for i := range g.NodeTypes {
		t := &g.NodeTypes[i]
		if take := min(t.Nodes-first, int64(len(dst))/row); take > 0 {
			if err := d.readRowsOf(i, t, first, dst[:take*row]); err != nil {
				return err
			}
			dst = dst[take*row:]
		}
		first = max(first-t.Nodes, 0)
	}
	return nil
}

// readRowsOf reads rows of one type, by their numbers within it.
func (d *Dataset) readRowsOf(nodeType int, t *NodeType, first int64, dst []byte) error {
	f, err := d.featureFile(nodeType)
	if err != nil {
		return err
	}
	row, inFile := int64(d.Meta.RowBytes()), int64(t.Dim)*int64(d.Meta.FileDType().Size)
	n := int64(len(dst)) / row
	b := dst[:n*inFile]
	if err := f.ReadAt(b, f.first+first*inFile); err != nil {
		return fmt.Errorf("row %d: %w", first, err)
	}
	// an odd number of halves, or a narrow type: from the last row on, move each to its place and
	// pad it
	if inFile != row {
		for i := n - 1; i >= 0; i-- {
			to := dst[i*row : (i+1)*row]
			copy(to, b[i*inFile:(i+1)*inFile])
			clear(to[inFile:])
		}
	}
	return nil
}

// featuresOf is the file of a type's rows.
func (m *Meta) featuresOf(nodeType int) string {
	if !m.Typed() {
		return FeaturesName
	}
	return path.Join(m.NodeTypes[nodeType].Dir, FeaturesName)
}

// RowReader reads the dataset's rows as rows of a type. One goroutine uses it.
type RowReader struct {
	d    *Dataset
	t    rowtype.Type
	raw  []byte
	wide []float32
}

// convertBytes of the dataset's own rows are converted at a time.
const convertBytes = 256 << 10

// RowsAs reads rows converted to a type.
func (d *Dataset) RowsAs(t rowtype.Type) *RowReader { return &RowReader{d: d, t: t} }

// Read is ReadRows in the reader's type. A value that it cannot hold is an error of class usage
// that names its row and what to do. Scales of rows are left out.
func (r *RowReader) Read(first int64, dst []byte) error { return r.ReadScaled(first, dst, nil) }

// ReadScaled is Read that also gives the rows' scales, of a type that has some; nil: nobody asks.
func (r *RowReader) ReadScaled(first int64, dst []byte, scales []float32) error {
	from := r.d.Meta.RowType()
	if r.t == from {
		return r.d.ReadRows(first, dst)
	}
	in, out, dim := int64(r.d.Meta.RowBytes()), int64(r.t.RowBytes(r.d.Meta.Dim)), r.d.Meta.Dim
	if int64(len(dst))%out != 0 {
		return fmt.Errorf("%s: %d bytes are not rows of %d", r.d.RowSource(), len(dst), out)
	}
	if r.wide == nil {
		r.raw, r.wide = make([]byte, max(convertBytes/in, 1)*in), make([]float32, dim)
	}
	for len(dst) > 0 {
		n := min(int64(len(dst))/out, int64(len(r.raw))/in)
		if err := r.d.ReadRows(first, r.raw[:n*in]); err != nil {
			return err
		}
		for i := range n {
			from.Decode(simd.Auto, r.wide, r.raw[i*in:(i+1)*in], 1)
			scale, err := r.t.Encode(dst[i*out:(i+1)*out], r.wide)
			if err != nil {
				return r.d.outOfRange(first+i, err)
			}
			if scales != nil {
				scales[i] = scale
			}
		}
		if scales != nil {
			scales = scales[n:]
		}
		first += n
		dst = dst[n*out:]
	}
	return nil
}

// RowSource returns what the dataset's rows come from, for messages.
func (d *Dataset) RowSource() string {
	switch {
	case d.Meta.FeatureFn != "":
		return d.Meta.FeatureFn
	case len(d.Meta.NodeTypes) > 1:
		return d.dir
	}
	return d.Path(d.Meta.featuresOf(0))
}

func (d *Dataset) outOfRange(row int64, err error) error {
	var re *rowtype.RangeError
	if !errors.As(err, &re) {
		return err
	}
	next := errs.Text("replace it with a number and import again")
	if wider, ok := re.Wider(); ok {
		next = errs.Textf("use {row-dtype} %s", wider)
	}
	return errs.New(errs.Usage, "%s: %s: %w; %s", d.RowSource(), d.Meta.rowName(row), err, next)
}

// rowName names a row of the row space.
func (m *Meta) rowName(row int64) string {
	if len(m.NodeTypes) < 2 {
		return fmt.Sprintf("row %d", row)
	}
	t := 0
	for row >= m.NodeTypes[t].Nodes {
		row -= m.NodeTypes[t].Nodes
		t++
	}
	return fmt.Sprintf("row %d of %s", row, m.NodeTypes[t].Name)
}
