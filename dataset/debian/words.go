package debian

import (
	"cmp"
	"math"
	"slices"
	"strings"
)

// words cuts text into lower-case runs of letters and digits, without single characters and
// plain numbers, which are versions more often than words.
func words(text string) []string {
	var out []string
	for _, w := range strings.FieldsFunc(strings.ToLower(text), func(r rune) bool {
		return !(r >= 'a' && r <= 'z' || r >= '0' && r <= '9' || r > 127)
	}) {
		if len(w) > 1 && strings.Trim(w, "0123456789") != "" {
			out = append(out, w)
		}
	}
	return out
}

// DescriptionWords are the words of the package's description that are not in its name or in
// its source package's name: those would give away the section of families such as lib*-perl.
func (p *Package) DescriptionWords(long bool) []string {
	text := p.Description
	if !long {
		text, _, _ = strings.Cut(text, "\n")
	}
	name := words(p.Name + " " + p.SourceName())
	return slices.DeleteFunc(words(text), func(w string) bool { return slices.Contains(name, w) })
}

// Vocabulary is the words that become features, by column.
type Vocabulary struct {
	Words  []string
	column map[string]int
	idf    []float32
}

// NewVocabulary takes the dim words that are in most documents, of those in at least two; ties
// go to the alphabet. Only counts of documents are used, never labels.
func NewVocabulary(documents [][]string, dim int) *Vocabulary {
	count := map[string]int{}
	for _, d := range documents {
		for i, w := range d {
			if !slices.Contains(d[:i], w) {
				count[w]++
			}
		}
	}
	var all []string
	for w, n := range count {
		if n >= 2 {
			all = append(all, w)
		}
	}
	slices.SortFunc(all,
		func(a, b string) int { return cmp.Or(count[b]-count[a], strings.Compare(a, b)) })
	v := &Vocabulary{Words: all[:min(dim, len(all))], column: map[string]int{}}
	for i, w := range v.Words {
		v.column[w] = i
		v.idf = append(v.idf, float32(math.Log(float64(1+len(documents))/float64(1+count[w]))+1))
	}
	return v
}

// Row fills row (one entry per word at least, the rest stays 0) with the document's TF-IDF
// weights, scaled to length 1; all zeros when it has no word of the vocabulary.
func (v *Vocabulary) Row(document []string, row []float32) {
	clear(row)
	for _, w := range document {
		if c, ok := v.column[w]; ok {
			row[c] += v.idf[c]
		}
	}
	var sum float64
	for _, x := range row {
		sum += float64(float64(x) * float64(x))
	}
	if sum == 0 {
		return
	}
	scale := float32(1 / math.Sqrt(sum))
	for i := range row {
		row[i] *= scale
	}
}
