package policy

// Belady is MIN with bypass (Ginex): it needs the future, so package replay plays it, over a trace.
const Belady = "belady"

func init() {
	register(&Policy{Name: Belady,
		Summary: "MIN: the line whose next access is the furthest leaves", order: 100,
		Offline: "needs to know the future: record a run (option trace) and play it with \"heliosctl cache replay --policy belady\""})
}
