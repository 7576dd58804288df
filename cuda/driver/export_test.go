//go:build linux && (amd64 || arm64) && !nocuda

package driver

// SMs is the number of SMs that the stream really has: budgets come in steps of the GPU's
// granularity.
func (s *gpuStream) SMs() int {
	if s.green != nil {
		return s.green.sms
	}
	return s.d.info.SMs
}
