package main

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"helios/internal/probe"
)

// The verdict names the best that there is, and for each thing that is not there the first step.
func TestDoctorVerdict(t *testing.T) {
	find := func(part, name string, a probe.Answer, next string) doctorFinding {
		return doctorFinding{part, probe.Finding{Name: name, Answer: a, Next: next}}
	}
	host := []doctorFinding{find("host", "host device", probe.There, ""),
		find("host", "software SSDs", probe.There, "")}
	vfio := []doctorFinding{find("vfio", "IOMMU", probe.There, ""),
		find("vfio", "VFIO", probe.There, "")}
	gpu := find("cuda:0", "kernels load", probe.There, "")
	ssd := find("nvme", "0000:01:00.0", probe.There, "")
	join := func(parts ...[]doctorFinding) (all []doctorFinding) {
		for _, p := range parts {
			all = append(all, p...)
		}
		return all
	}
	for _, c := range []struct {
		name         string
		all          []doctorFinding
		can, missing string
	}{
		{"everything", join(host, vfio, []doctorFinding{gpu, ssd}),
			"train on a GPU with features from NVMe SSDs by VFIO", "Nothing is missing"},
		{"an SSD in use", join(host, vfio, []doctorFinding{gpu,
			find("nvme", "0000:01:00.0", probe.NotThere, "an SSD that nobody uses")}),
			"train on a GPU with features from files, disks or memory that play SSDs (bind-ssds --proxy)",
			"For an SSD of its own: an SSD that nobody uses"},
		{"a laptop", join(host, []doctorFinding{
			find("vfio", "IOMMU", probe.NotThere, "switch it on"),
			find("vfio", "huge pages", probe.NotThere, "not needed"), ssd,
			find("cuda", "driver", probe.NotThere, "install it")}),
			"train on this machine's CPU with features from files, disks or memory that play SSDs (bind-ssds --proxy)",
			"For a GPU: install it; for SSDs by VFIO: switch it on"},
		{"kernels that do not load", join(host, vfio, []doctorFinding{ssd,
			find("cuda", "driver", probe.There, ""),
			find("cuda:0", "kernels load", probe.NotThere, "a newer driver")}),
			"train on this machine's CPU with features from NVMe SSDs by VFIO",
			"For a GPU: a newer driver"},
		{"nothing", []doctorFinding{find("host", "host device", probe.Unknown, ""),
			find("host", "software SSDs", probe.NotThere, "a folder for it")},
			"not train here, but see how a run would go on other machines: train --clock virtual",
			"For software SSDs: a folder for it"},
	} {
		can, missing := verdictOf(c.all)
		require.Equal(t, c.can, can, c.name)
		require.Equal(t, c.missing, missing, c.name)
	}
	isolate(t)
	out := strings.Split(strings.TrimSpace(ok(t, "doctor")), "\n")
	require.Regexp(t, `^You can .*\.$`, out[len(out)-2])
	require.Regexp(t, `^(For .*|Nothing is missing)\.$`, out[len(out)-1])
}
