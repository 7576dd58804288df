package ranks

import (
	"fmt"
	"net"
	"strconv"
	"strings"

	"helios/internal/errs"
	"helios/internal/mpi"
)

// Launch is a launcher's description of this process.
type Launch struct {
	Rank, Size int
	Local      int      // rank on this machine; -1: not said
	Nodes      int      // machines that the ranks run on; 0: not said
	MPI        mpi.Kind // of mpirun; "": TCP
	Master     string   // host:port at which the others find the first rank
	Job        string   // tells this run from others that use the same port
	By         string   // the variable with Size
	// Note, where there is one, is what people may want to know of the launcher's variables.
	Note string
}

// environment looks a variable up.
type environment func(name string) (string, bool)

// Variables of torchrun, which people set by hand, too.
const (
	rankVar, sizeVar, localVar = "RANK", "WORLD_SIZE", "LOCAL_RANK"
	hostVar, portVar           = "MASTER_ADDR", "MASTER_PORT"
	elasticVar                 = "TORCHELASTIC_RUN_ID"
)

// FromEnv reads the variables of a launcher; nil where there is none.
//
// Launchers start each other: torchrun runs in a task of Slurm, mpirun in a batch script. RANK and
// WORLD_SIZE are of the innermost one, or of a person, and hold where both are there; what is left
// out is the other launcher's.
func FromEnv(get func(string) (string, bool)) (*Launch, error) {
	l, err := environment(get).read()
	if err != nil {
		return nil, err
	}
	return l, nil
}

func (e environment) read() (*Launch, error) {
	haveRank, haveSize := e.has(rankVar), e.has(sizeVar)
	if haveRank && haveSize && e.has(elasticVar) {
		return e.torch()
	}
	outer, err := e.launcher()
	if err != nil || !haveRank && !haveSize {
		return outer, err
	}
	if outer == nil {
		return e.torch()
	}
	var inner Launch
	if err := e.numbers(&inner, rankVar, sizeVar, localVar, haveRank && haveSize); err != nil {
		return nil, err
	}
	return e.agree(&inner, outer)
}

// agree holds the numbers that a person, or an inner launcher, gave in part against those of the
// outer launcher.
func (e environment) agree(inner, outer *Launch) (*Launch, error) {
	haveRank := e.has(rankVar)
	switch {
	case e.has(sizeVar) && inner.Size != outer.Size:
		if !haveRank || inner.Size > 1 && !(e.has(hostVar) && e.has(portVar)) {
			return nil, errs.New(errs.Usage,
				"environment: WORLD_SIZE=%d and %s=%d contradict each other; unset WORLD_SIZE, or set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT for each process",
				inner.Size, outer.By, outer.Size)
		}
		l, err := e.torch()
		if err == nil && l.Size == 1 {
			l.Note = fmt.Sprintf("WORLD_SIZE=1: this process trains by itself, though %s=%d", outer.By,
				outer.Size)
		}
		return l, err
	case haveRank && inner.Rank != outer.Rank:
		return nil, errs.New(errs.Usage,
			"environment: RANK=%d, though the launcher that set %s calls this process rank %d; unset RANK, or set it for each process",
			inner.Rank, outer.By, outer.Rank)
	case inner.Local >= 0 && outer.MPI == "":
		outer.Local = inner.Local
	}
	return outer, nil
}

func (e environment) has(name string) bool {
	v, ok := e(name)
	return ok && v != ""
}

// first is the first of the variables that is set.
func (e environment) first(names ...string) string {
	for _, n := range names {
		if e.has(n) {
			return n
		}
	}
	return ""
}

func (e environment) torch() (*Launch, error) {
	l := &Launch{By: sizeVar}
	l.Job, _ = e(elasticVar)
	if err := e.numbers(l, rankVar, sizeVar, localVar, true); err != nil || l.Size == 1 {
		return l, err
	}
	if e.has("GROUP_WORLD_SIZE") {
		if err := e.number("GROUP_WORLD_SIZE", &l.Nodes, 1, MaxSize); err != nil {
			return nil, err
		}
	}
	for _, n := range []string{hostVar, portVar} {
		if !e.has(n) {
			return nil, missing(n)
		}
	}
	return l, e.meet(l, "", 0)
}

// meet sets the address at which the ranks meet: MASTER_ADDR and MASTER_PORT, in whose place others
// stand where they are not set.
func (e environment) meet(l *Launch, host string, port int) error {
	if e.has(hostVar) {
		host, _ = e(hostVar)
	}
	if e.has(portVar) {
		if err := e.number(portVar, &port, 1, 65535); err != nil {
			return err
		}
	}
	// torchrun may listen there itself.
	if v, _ := e("TORCHELASTIC_USE_AGENT_STORE"); v == "True" {
		if port++; port > 65535 {
			return errs.New(errs.Usage,
				"MASTER_PORT=65535 is torchrun's own, and there is none behind it; give torchrun a lower one")
		}
	}
	if l.Nodes == 1 {
		host = "127.0.0.1" // nobody else need reach it
	}
	l.Master = net.JoinHostPort(strings.Trim(host, "[]"), strconv.Itoa(port))
	return nil
}

// launcher reads the variables of those that start processes by themselves; nil where there are
// none.
func (e environment) launcher() (*Launch, error) {
	for _, m := range []struct {
		kind              mpi.Kind
		rank, size, local string
	}{
		{mpi.OpenMPI, "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"},
		{mpi.MPICH, "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"},
	} {
		if e.first(m.rank, m.size) != "" {
			l := &Launch{MPI: m.kind, By: m.size}
			return l, e.numbers(l, m.rank, m.size, m.local, true)
		}
	}
	if l, err := e.slurm(); l != nil || err != nil {
		return l, err
	}
	for _, o := range []struct{ name, rank, size string }{
		{"PMIx", "PMIX_RANK", ""}, {"MVAPICH", "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE"},
		{"Flux", "FLUX_TASK_RANK", "FLUX_JOB_SIZE"}, {"PALS", "PALS_RANKID", ""},
		{"Horovod", "HOROVOD_RANK", "HOROVOD_SIZE"}, {"jsrun", "JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE"}, {"aprun", "ALPS_APP_PE", ""},
	} {
		size, _ := e(o.size)
		if e.has(o.rank) && size != "1" && !(e.has(rankVar) && e.has(sizeVar)) {
			return nil, errs.New(errs.Usage,
				"environment: %s is set: %s started this process, perhaps with others, and ranks cannot join by its variables; set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT for each process (RANK=0 and WORLD_SIZE=1 for one that trains by itself), or use mpirun, srun or torchrun",
				o.rank, o.name)
		}
	}
	return nil, nil
}

func missing(name string) error {
	return errs.New(errs.Usage,
		"environment: %s is not set, others of RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT are; set all four for a run of several ranks, or unset RANK and WORLD_SIZE for a run of one",
		name)
}

// numbers reads a launcher's numbers of ranks; where not all have to be there, those that are.
func (e environment) numbers(l *Launch, rank, size, local string, all bool) error {
	l.Local = -1
	for _, x := range []struct {
		name string
		to   *int
		must bool
		low  int
		high int
	}{
		{size, &l.Size, all, 1, MaxSize}, {rank, &l.Rank, all, 0, MaxSize - 1},
		{local, &l.Local, false, 0, MaxSize - 1},
	} {
		if !e.has(x.name) {
			switch {
			case !x.must:
				continue
			case size == sizeVar:
				return missing(x.name)
			}
			return errs.New(errs.Usage,
				"environment: %s is not set, though others of %s and %s are; start the process by its launcher, or unset them for a run of one",
				x.name, rank, size)
		}
		if err := e.number(x.name, x.to, x.low, x.high); err != nil {
			return err
		}
	}
	if all && l.Rank >= l.Size {
		return errs.New(errs.Usage, "environment: %s=%d, and %s=%d: ranks count from 0", rank,
			l.Rank, size, l.Size)
	}
	return nil
}

func (e environment) number(name string, to *int, low, high int) error {
	text, _ := e(name)
	n, err := strconv.Atoi(text)
	if err != nil || n < low || n > high {
		return errs.New(errs.Usage, "environment: %s=%q is not a number of %d to %d", name, text, low,
			high)
	}
	*to = n
	return nil
}

// slurm reads the variables of a task that srun started; nil where it did not. Debian's Slurm 22.05
// sets SLURM_PROCID=0 and SLURM_NTASKS of the allocation in a batch script, too, without a step.
// There the variables of a step, if any, are left from the shell that called sbatch.
func (e environment) slurm() (*Launch, error) {
	step := e.first("SLURM_STEP_ID", "SLURM_STEPID")
	id := 0
	if step != "" {
		if err := e.number(step, &id, 0, 1<<32-1); err != nil {
			return nil, err
		}
	}
	const special = 1<<32 - 16 // steps above are of batch scripts, shells of salloc and ssh
	size := e.first("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS")
	if id >= special || e.first("SLURM_PROCID", "SLURM_STEP_NUM_TASKS") == "" {
		return nil, nil
	}
	inStep := e.first(step, "SLURM_STEP_NUM_TASKS", "SLURM_STEP_NODELIST",
		"SLURM_LAUNCH_NODE_IPADDR") != ""
	rank, _ := e("SLURM_PROCID")
	if !inStep && rank == "0" && e.first("SLURM_JOB_ID", "SLURM_JOBID") != "" {
		return nil, nil // a batch script
	}
	l := &Launch{By: size}
	if size == "" {
		l.By = "SLURM_STEP_NUM_TASKS"
	}
	err := e.numbers(l, "SLURM_PROCID", l.By, "SLURM_LOCALID", true)
	if err != nil || l.Size == 1 {
		return l, err
	}
	if !inStep {
		return nil, errs.New(errs.Usage,
			"environment: SLURM_PROCID=%d and %s=%d are set, and SLURM_STEP_ID is not; start the ranks by srun, with all of its variables, or unset SLURM_PROCID for a run of one",
			l.Rank, l.By, l.Size)
	}
	if e.has("SLURM_NTASKS") {
		n := 0
		if err := e.number("SLURM_NTASKS", &n, 1, MaxSize); err != nil {
			return nil, err
		}
		if n != l.Size {
			return nil, errs.New(errs.Usage,
				"environment: %s=%d and SLURM_NTASKS=%d contradict each other; start the ranks by srun, or unset SLURM_STEP_ID and SLURM_STEP_NUM_TASKS in a batch script for a run of one",
				l.By, l.Size, n)
		}
	}
	// Each task sees only its own GPUs then.
	tres, _ := e("SLURM_TRES_PER_TASK")
	if e.has("SLURM_GPUS_PER_TASK") || strings.Contains(tres, "gpu") {
		l.Local = 0
	}
	return l, e.meetInSlurm(l, id)
}

// meetInSlurm takes the first node of the step for that of the first rank, and a port by the
// numbers of job and step, below those that systems give away.
func (e environment) meetInSlurm(l *Launch, step int) error {
	if nodes := e.first("SLURM_STEP_NUM_NODES", "SLURM_NNODES"); nodes != "" {
		if err := e.number(nodes, &l.Nodes, 1, MaxSize); err != nil {
			return err
		}
	}
	host, port := "", 0
	if !e.has(hostVar) && l.Nodes != 1 {
		list, _ := e("SLURM_STEP_NODELIST")
		var ok bool
		if host, ok = firstNode(list); !ok {
			return errs.New(errs.Usage,
				"environment: SLURM_STEP_NODELIST=%q does not tell the first node; set MASTER_ADDR to the address of rank 0's machine",
				list)
		}
		if node, _ := e("SLURMD_NODENAME"); l.Rank == 0 && node != "" && node != host {
			return errs.New(errs.Usage,
				"environment: rank 0 runs on %s, which is not the first of SLURM_STEP_NODELIST; set MASTER_ADDR=%s for all ranks",
				node, node)
		}
	}
	job := 0
	name := e.first("SLURM_JOB_ID", "SLURM_JOBID")
	if name != "" {
		if err := e.number(name, &job, 1, 1<<32-1); err != nil {
			return err
		}
		id, _ := e(name)
		l.Job = "slurm " + id + "." + strconv.Itoa(step)
		port = 18000 + (job*31+step)%12000
	} else if !e.has(portVar) {
		return errs.New(errs.Usage,
			"environment: SLURM_JOB_ID is not set, by which ranks choose a port; start them by srun, or set MASTER_PORT")
	}
	return e.meet(l, host, port)
}

// firstNode is the first name in a list of nodes as Slurm writes it: node[01-03,7]-ib,gpu1.
func firstNode(list string) (string, bool) {
	var name strings.Builder
	for list != "" && list[0] != ',' {
		if list[0] != '[' {
			name.WriteByte(list[0])
			list = list[1:]
			continue
		}
		within, rest, closed := strings.Cut(list[1:], "]")
		after := strings.TrimLeft(within, "0123456789")
		digits := within[:len(within)-len(after)]
		if !closed || digits == "" || after != "" && after[0] != ',' && after[0] != '-' {
			return "", false
		}
		name.WriteString(digits)
		list = rest
	}
	host := name.String()
	return host, host != "" && !strings.ContainsAny(host, " []()\t\n")
}
