// A METIS whose numbers are of type IDX. It deals nodes out where all arguments are as METIS 5 wants
// them.
#include <stdint.h>
#include <stddef.h>
#include <string.h>

typedef IDX idx_t;

int METIS_SetDefaultOptions(idx_t *options)
{
	memset(options, 0xff, 40 * sizeof *options);
	return 1;
}

int METIS_PartGraphKway(idx_t *nvtxs, idx_t *ncon, idx_t *xadj, idx_t *adjncy, idx_t *vwgt,
	idx_t *vsize, idx_t *adjwgt, idx_t *nparts, void *tpwgts, void *ubvec, idx_t *options,
	idx_t *edgecut, idx_t *part)
{
	if (*ncon != 1 || vwgt || vsize || adjwgt || tpwgts || ubvec || xadj[0] != 0)
		return -2;
	for (int i = 0; i < 40; i++) // all but the seed and the imbalance are the defaults
		if (options[i] != (i == 8 ? 77 : i == 16 ? 50 : -1))
			return -2;
	for (idx_t v = 0; v < *nvtxs; v++)
		for (idx_t e = xadj[v]; e < xadj[v + 1]; e++)
			if (adjncy[e] == v || adjncy[e] < 0 || adjncy[e] >= *nvtxs)
				return -2;
	if (*nparts == 13)
		return -3;
	if (*nparts == 14)
		return -4;
	for (idx_t v = 0; v < *nvtxs; v++)
		part[v] = v % *nparts;
	*edgecut = 0;
	return 1;
}
