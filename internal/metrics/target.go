package metrics

// Target is the kind of answer that a task has for each node.
type Target string

// The targets, by their names in dataset.yaml.
const (
	Classes Target = "class"       // one of several classes
	Labels  Target = "multi-label" // some of several labels
	Numbers Target = "regression"  // one or more numbers
)

// Singular is the word for one of them.
func (t Target) Singular() string {
	return map[Target]string{Classes: "class", Labels: "label", Numbers: "number"}[t]
}

// Plural is the word for several of them.
func (t Target) Plural() string {
	return map[Target]string{Classes: "classes", Labels: "labels", Numbers: "numbers"}[t]
}
