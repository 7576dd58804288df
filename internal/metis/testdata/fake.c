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

static int partition(idx_t *nvtxs, idx_t *ncon, idx_t *xadj, idx_t *adjncy, idx_t *vwgt,
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
	return 1;
}

#define ARGUMENTS idx_t *nvtxs, idx_t *ncon, idx_t *xadj, idx_t *adjncy, idx_t *vwgt, idx_t *vsize, \
	idx_t *adjwgt, idx_t *nparts, void *tpwgts, void *ubvec, idx_t *options, idx_t *edgecut, idx_t *part
#define PASSED nvtxs, ncon, xadj, adjncy, vwgt, vsize, adjwgt, nparts, tpwgts, ubvec, options, edgecut, part

int METIS_PartGraphKway(ARGUMENTS)
{
	*edgecut = 100;
	return partition(PASSED);
}

// Bisection deals the other way round, and cuts fewer edges with an even number of parts. Of four
// parts the first is too large; with six it fails, and with eight a number is no part.
int METIS_PartGraphRecursive(ARGUMENTS)
{
	int status = partition(PASSED);

	*edgecut = *nparts % 2 ? 100 : 99;
	for (idx_t v = 0; v < *nvtxs; v++)
		part[v] = *nparts == 4 && v % 2 ? 0 : *nparts - 1 - part[v];
	if (*nparts == 8)
		part[0] = 8;
	return *nparts == 6 ? -4 : status;
}
