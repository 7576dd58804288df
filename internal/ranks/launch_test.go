package ranks

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"helios/internal/errs"
	"helios/internal/mpi"
)

// fromText reads an environment of lines or words NAME=VALUE.
func fromText(text string) (*Launch, error) {
	env := map[string]string{}
	for _, f := range strings.Fields(text) {
		k, v, _ := strings.Cut(f, "=")
		env[k] = v
	}
	return FromEnv(func(k string) (string, bool) { v, ok := env[k]; return v, ok })
}

const (
	step = "SLURM_JOB_ID=7 SLURM_STEP_ID=1 SLURM_NTASKS=4 SLURM_STEP_NUM_TASKS=4 SLURM_STEP_NUM_NODES=2 SLURM_STEP_NODELIST=n[01-02] "
	ompi = "OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=2 "
	hand = "MASTER_ADDR=a MASTER_PORT=9 "
)

func TestFromEnv(t *testing.T) {
	for env, want := range map[string]*Launch{
		"":                              nil,
		"MASTER_ADDR=a MASTER_PORT=1":   nil,
		"RANK=0 WORLD_SIZE=1":           {Size: 1, Local: -1, By: "WORLD_SIZE"},
		"SLURM_NTASKS=4 SLURM_JOB_ID=1": nil, // a shell of salloc
		"SLURM_NTASKS=4 SLURM_JOB_ID=1 SLURM_PROCID=0":                                  nil, // a batch script
		"SLURM_NTASKS=4 SLURM_PROCID=0 SLURM_STEP_ID=4294967291":                        nil,
		"SLURM_NTASKS=4 SLURM_PROCID=0 SLURM_STEP_ID=4294967290 SLURM_STEP_NUM_TASKS=1": nil,
		"SLURM_PROCID=0 SLURM_NTASKS=1":                                                 {Size: 1, Local: -1, By: "SLURM_NTASKS"},
		"SLURM_NTASKS=4096 SLURM_JOB_ID=1 SLURM_PROCID=0":                               nil,
		"FLUX_TASK_RANK=0 FLUX_JOB_SIZE=1":                                              nil,
		"PMIX_RANK=0 RANK=0 WORLD_SIZE=1": {
			Size: 1, Local: -1, By: "WORLD_SIZE",
		},
		"RANK=1 WORLD_SIZE=3 LOCAL_RANK= " + hand: {
			Rank: 1, Size: 3, Local: -1, Master: "a:9", By: "WORLD_SIZE",
		},
		"RANK=1 WORLD_SIZE=3 LOCAL_RANK=1 " + hand: {
			Rank: 1, Size: 3, Local: 1, Master: "a:9", By: "WORLD_SIZE",
		},
		"RANK=1 WORLD_SIZE=3 GROUP_WORLD_SIZE=1 TORCHELASTIC_RUN_ID=j " + hand: {
			Rank: 1, Size: 3, Local: -1, Nodes: 1, Job: "j", Master: "127.0.0.1:9", By: "WORLD_SIZE",
		},
		"RANK=1 WORLD_SIZE=3 MASTER_ADDR=::1 MASTER_PORT=9 TORCHELASTIC_USE_AGENT_STORE=True": {
			Rank: 1, Size: 3, Local: -1, Master: "[::1]:10", By: "WORLD_SIZE",
		},
		ompi + "OMPI_COMM_WORLD_LOCAL_RANK=0": {
			Rank: 1, Size: 2, MPI: mpi.OpenMPI, By: "OMPI_COMM_WORLD_SIZE",
		},
		ompi + "RANK=1 WORLD_SIZE=2": {
			Rank: 1, Size: 2, Local: -1, MPI: mpi.OpenMPI, By: "OMPI_COMM_WORLD_SIZE",
		},
		"PMI_RANK=1 PMI_SIZE=2": {
			Rank: 1, Size: 2, Local: -1, MPI: mpi.MPICH, By: "PMI_SIZE",
		},
		"PMI_RANK=1 PMI_SIZE=2 SLURM_PROCID=1 " + step: {
			Rank: 1, Size: 2, Local: -1, MPI: mpi.MPICH, By: "PMI_SIZE",
		},
		"PMI_RANK=1 PMI_SIZE=2 TORCHELASTIC_RUN_ID=j RANK=4 WORLD_SIZE=8 " + hand: {
			Rank: 4, Size: 8, Local: -1, Job: "j", Master: "a:9", By: "WORLD_SIZE",
		},
		ompi + "RANK=0 WORLD_SIZE=1": {
			Size: 1, Local: -1, By: "WORLD_SIZE", Note: "WORLD_SIZE=1: this process trains by itself, though OMPI_COMM_WORLD_SIZE=2",
		},
		"SLURM_PROCID=0 SLURM_STEP_ID=0 SLURM_STEP_NUM_TASKS=1 SLURM_NTASKS=1": {
			Size: 1, Local: -1, By: "SLURM_STEP_NUM_TASKS",
		},
		// sbatch, called in a step of one task.
		"SLURM_PROCID=0 SLURM_STEP_ID=0 SLURM_STEP_NUM_TASKS=1 SLURM_NTASKS=4": {
			Size: 1, Local: -1, By: "SLURM_STEP_NUM_TASKS",
		},
		"SLURM_PROCID=3 SLURM_LOCALID=1 PMIX_RANK=3 " + step: {
			Rank: 3, Size: 4, Local: 1, Nodes: 2, Job: "slurm 7.1", Master: "n01:18218", By: "SLURM_STEP_NUM_TASKS",
		},
		"SLURM_PROCID=3 SLURM_LOCALID=1 SLURM_GPUS_PER_TASK=1 " + step + hand: {
			Rank: 3, Size: 4, Nodes: 2, Job: "slurm 7.1", Master: "a:9", By: "SLURM_STEP_NUM_TASKS",
		},
		"SLURM_PROCID=3 WORLD_SIZE=4 LOCAL_RANK=0 " + step + hand: {
			Rank: 3, Size: 4, Nodes: 2, Job: "slurm 7.1", Master: "a:9", By: "SLURM_STEP_NUM_TASKS",
		},
		"SLURM_PROCID=1 RANK=6 WORLD_SIZE=8 " + step + hand: {
			Rank: 6, Size: 8, Local: -1, Master: "a:9", By: "WORLD_SIZE",
		},
		"SLURM_PROCID=1 SLURM_STEPID=2 SLURM_JOBID=3 SLURM_NPROCS=2 SLURM_STEP_NUM_NODES=1": {
			Rank: 1, Size: 2, Local: -1, Nodes: 1, Job: "slurm 3.2", Master: "127.0.0.1:18095", By: "SLURM_NPROCS",
		},
	} {
		got, err := fromText(env)
		require.NoError(t, err, env)
		require.Equal(t, want, got, env)
	}
}

func TestEnvironmentsThatContradict(t *testing.T) {
	for env, says := range map[string]string{
		"RANK=1":                            "WORLD_SIZE is not set",
		"WORLD_SIZE=2":                      "RANK is not set",
		"RANK=1 WORLD_SIZE=2":               "MASTER_ADDR is not set",
		"RANK=1 WORLD_SIZE=2 MASTER_ADDR=a": "MASTER_PORT is not set",
		"RANK=1 WORLD_SIZE=2 MASTER_ADDR=a MASTER_PORT=0": "MASTER_PORT=\"0\" is not a number",
		"RANK=2 WORLD_SIZE=2 MASTER_ADDR=a MASTER_PORT=1": "ranks count from 0",
		"RANK=x WORLD_SIZE=2":                             `RANK="x" is not a number`,
		"RANK=0 WORLD_SIZE=0":                             `WORLD_SIZE="0" is not a number`,
		"RANK=0 WORLD_SIZE=2 MASTER_ADDR=a MASTER_PORT=65535 TORCHELASTIC_USE_AGENT_STORE=True": "torchrun's own",
		"OMPI_COMM_WORLD_SIZE=2":                       "OMPI_COMM_WORLD_RANK is not set",
		"OMPI_COMM_WORLD_RANK=1":                       "OMPI_COMM_WORLD_SIZE is not set",
		"PMI_RANK=1":                                   "PMI_SIZE is not set",
		ompi + "RANK=0 WORLD_SIZE=2":                   "RANK=0, though the launcher that set OMPI_COMM_WORLD_SIZE",
		ompi + "RANK=0 WORLD_SIZE=4":                   "WORLD_SIZE=4 and OMPI_COMM_WORLD_SIZE=2 contradict",
		"PMIX_RANK=0":                                  "PMIX_RANK is set: PMIx started this process",
		"PALS_RANKID=1":                                "PALS_RANKID is set",
		"FLUX_TASK_RANK=1 FLUX_JOB_SIZE=2":             "FLUX_TASK_RANK is set",
		"HOROVOD_RANK=1 HOROVOD_SIZE=2":                "Horovod started this process",
		"MV2_COMM_WORLD_RANK=0 MV2_COMM_WORLD_SIZE=2":  "MVAPICH started this process",
		"SLURM_PROCID=1 SLURM_JOB_ID=1 SLURM_NTASKS=2": "SLURM_STEP_ID is not",
		"SLURM_PROCID=1":                               "SLURM_STEP_NUM_TASKS is not set",
		"SLURM_PROCID=0 SLURM_NTASKS=2":                "SLURM_STEP_ID is not",
		"SLURM_PROCID=0 SLURM_NTASKS=2 SLURM_LAUNCH_NODE_IPADDR=10.0.0.1":             "set MASTER_ADDR",
		"SLURM_PROCID=0 SLURM_STEP_ID=x":                                              `SLURM_STEP_ID="x" is not a number`,
		"SLURM_NTASKS=2 SLURM_STEP_ID=0 SLURM_STEP_NUM_TASKS=2":                       "SLURM_PROCID is not set",
		"SLURM_PROCID=4 " + step:                                                      "ranks count from 0",
		"SLURM_PROCID=0 SLURM_STEP_NUM_TASKS=2 SLURM_NTASKS=4 SLURM_STEP_ID=0":        "SLURM_STEP_NUM_TASKS=2 and SLURM_NTASKS=4 contradict",
		"SLURM_PROCID=0 WORLD_SIZE=2 " + step + hand:                                  "WORLD_SIZE=2 and SLURM_STEP_NUM_TASKS=4 contradict",
		"SLURM_PROCID=1 RANK=0 " + step + hand:                                        "RANK=0, though the launcher that set SLURM_STEP_NUM_TASKS calls this process rank 1",
		"SLURM_PROCID=0 SLURMD_NODENAME=n02 " + step:                                  "set MASTER_ADDR=n02",
		"SLURM_PROCID=0 SLURM_STEP_ID=0 SLURM_STEP_NUM_TASKS=2 SLURM_JOB_ID=1":        "SLURM_STEP_NODELIST=\"\" does not tell",
		"SLURM_PROCID=0 SLURM_STEP_ID=0 SLURM_STEP_NUM_TASKS=2 SLURM_STEP_NODELIST=a": "SLURM_JOB_ID is not set",
	} {
		l, err := fromText(env)
		require.Nil(t, l, env)
		require.ErrorContains(t, err, says, env)
		require.Equal(t, errs.Usage, errs.ClassOf(err), env)
	}
}

// The environments that Slurm 22.05 gave to the shell of salloc, a batch script, its steps, and a
// batch script that a step submitted.
func TestSlurmsEnvironments(t *testing.T) {
	for name, want := range map[string]*Launch{
		"salloc": nil, "batch": nil,
		"batch-from-step": {Size: 1, Local: 0, By: "SLURM_STEP_NUM_TASKS"},
		"one":             {Size: 1, Local: 0, By: "SLURM_STEP_NUM_TASKS"},
		"four": {
			Rank: 1, Size: 4, Local: 1, Nodes: 1, Job: "slurm 11.0", Master: "127.0.0.1:18341", By: "SLURM_STEP_NUM_TASKS",
		},
		"two-nodes": {
			Rank: 1, Size: 2, Local: 0, Nodes: 2, Job: "slurm 15.0", Master: "node01:18465", By: "SLURM_STEP_NUM_TASKS",
		},
		"pmi2": {Rank: 1, Size: 2, Local: -1, MPI: mpi.MPICH, By: "PMI_SIZE"},
	} {
		b, err := os.ReadFile(filepath.Join("testdata", "slurm", name))
		require.NoError(t, err)
		got, err := fromText(string(b))
		require.NoError(t, err, name)
		require.Equal(t, want, got, name)
	}
}

func TestFirstNode(t *testing.T) {
	for list, want := range map[string]string{"a": "a", "a,b": "a", "node[01-03,7]": "node01",
		"node[7],x": "node7", "r[1-2]n[03-04]-ib,x": "r1n03-ib", "a-b[10-11]c": "a-b10c",
		"10.0.0.1": "10.0.0.1", "": "", ",a": "", "n[1-2": "", "n[]": "", "n[a-b]": "",
		"bgl[000x133]": "", "n[-1]": "", "a b": "", "n]1": "", "n[[1]]": ""} {
		got, ok := firstNode(list)
		require.Equal(t, want != "", ok, list)
		if ok {
			require.Equal(t, want, got, list)
		}
	}
}
