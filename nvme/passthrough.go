package nvme

import "context"

// Admin sends an admin command as it is and returns dword 0 of its completion. The command ID is
// filled in; where data is not empty (a multiple of 4 bytes) so are the PRPs, and the controller's
// answer is copied to it. op names the command in errors. Commands that create or delete queues
// that this Controller made confuse it.
func (c *Controller) Admin(ctx context.Context, op string, cmd Command, data []byte) (uint32,
	error) {
	return c.exec(ctx, false, op, cmd, data)
}
