package pages

import (
	"context"

	"github.com/google/uuid"
)

// Place makes stores of pages, opens them to be read, and removes them. InFolder is one; package
// dataset/stripe has one on the SSDs of a dataset. dir is the folder of the pack that pages are
// part of, which is there.
type Place interface {
	// LBABytes divides the offsets and sizes of reads there.
	LBABytes() int64
	// Create makes the pages of s. Pages that were not finished are resumed, and finished ones
	// are a *FinishedError.
	Create(ctx context.Context, dir string, s Spec) (Writer, error)
	// Open opens finished pages.
	Open(ctx context.Context, dir string, s Spec) (*Opened, error)
	// Remove removes the pages of a pack, finished or not. It is no error that there are none.
	Remove(ctx context.Context, dir string, id uuid.UUID) error
}

// Writer writes the pages of a store: it is a packed.Pages.
type Writer interface {
	WriteAt(ctx context.Context, page int64, data []byte) error
	ReadAt(ctx context.Context, page int64, data []byte) error
	Sync(ctx context.Context) error
	// Resumed reports whether pages were there that are resumed.
	Resumed() bool
	// Finish is Sync, and says that the pages are whole.
	Finish(ctx context.Context) error
	// Close ends the writing. Pages that are not finished stay, to be resumed.
	Close(ctx context.Context) error
}

// InFolder is the Place of pages in a file of their pack's own folder.
type InFolder struct{ Options OpenOptions }

// LBABytes is that of the software SSD over the file.
func (InFolder) LBABytes() int64 { return align }

// Create is CreateFolder.
func (InFolder) Create(_ context.Context, dir string, s Spec) (Writer, error) {
	f, err := CreateFolder(dir, s)
	if err != nil {
		return nil, err
	}
	return folderWriter{f}, nil
}

// Open is OpenFolder.
func (p InFolder) Open(ctx context.Context, dir string, s Spec) (*Opened, error) {
	return OpenFolder(ctx, dir, s, p.Options)
}

// Remove leaves the pages to whoever removes the folder that they are in.
func (InFolder) Remove(context.Context, string, uuid.UUID) error { return nil }

type folderWriter struct{ *Folder }

func (f folderWriter) Close(context.Context) error { return f.Folder.Close() }
