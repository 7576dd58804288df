package main

import (
	"context"
	"strings"

	"github.com/google/uuid"

	"helios/dataset/stripe"
	"helios/internal/errs"
)

// removedPages is the result of "ssds --remove-pages --json", one for each pack.
type removedPages struct {
	Pack string   `json:"pack"`
	SSDs []string `json:"ssds"`
}

// removePages is ssds --remove-pages.
func removePages(ctx context.Context, e *env, a *ssdsArgs) (err error) {
	var ids []uuid.UUID
	for _, text := range a.remove {
		id, err := uuid.Parse(text)
		if err != nil || id == uuid.Nil {
			return errs.New(errs.Usage,
				"{remove-pages} %q is no identity of a pack; \"heliosctl ssds\" shows those that are there",
				text)
		}
		ids = append(ids, id)
	}
	set, err := (&ssdOpener{env: e, ssdArgs: a.ssdArgs}).open(ctx)
	if err != nil {
		return whenStopped(err, "nothing was removed: run it again")
	}
	defer closing(&err, set.Close)
	for _, id := range ids {
		from, err := stripe.RemovePages(ctx, set.SSDs, id)
		if err != nil {
			return whenStopped(err, "run it again: it removes what is left")
		}
		e.ui.Printf("the pages of pack %s are removed from %s; its samples and plan are where they were",
			id, strings.Join(from, ", "))
		if err := e.ui.Event("result", removedPages{id.String(), from}); err != nil {
			return err
		}
	}
	return nil
}
