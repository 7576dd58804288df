package dataset

// FormatOptions are those that single formats have beside the common ones.
type FormatOptions struct {
	// Split chooses a folder of split/ where an OGB dataset has several.
	Split string
	// AddInverse says whether OGB's edges stand for both directions: "yes", "no", or "auto" (also ""), which
	// is what the dataset's master.csv or its name says.
	AddInverse string
	// Classes is IGB's set of labels: "19" (also "") or "2K".
	Classes string
	// Graph is the number of a graph in a file of DGL, from 0; -1 where the file holds only one.
	Graph int
	// Task is the name of a GraphBolt task, where there are several.
	Task string
	// NormalizeFeatures is "row" where planetoid is to divide each node's features by their sum.
	NormalizeFeatures string
	// Raw is what headerless arrays do not tell (raw).
	Raw RawOptions
}
