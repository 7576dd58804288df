package main

import (
	"context"
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/urfave/cli/v2"
	"golang.org/x/sys/unix"

	hcli "helios/internal/cli"
	"helios/internal/diskuse"
	"helios/internal/errs"
	"helios/internal/fileid"
	"helios/internal/pci"
	"helios/internal/rowtype"
	"helios/internal/state"
	"helios/internal/units"
	"helios/nvme/proxy"
)

func bindCommand() *cli.Command {
	return verb(&cli.Command{
		Name:      "bind-ssds",
		Usage:     "take SSDs into use: NVMe controllers by VFIO, or files and block devices behind software controllers",
		ArgsUsage: "[SSD…]",
		Description: "SSDs are named by PCI address, serial number, /dev/nvmeX or /dev/nvmeXnY. Each goes from the kernel's\n" +
			"driver to vfio-pci, with the IOMMU on and nothing else rebound, is brought up once through our own queues,\n" +
			"and given back when that fails. It needs root; using the SSDs afterwards does not. A disk that is mounted,\n" +
			"swapped to, held by RAID, LVM, dm or ZFS, open or booted from is always refused; one that holds data is refused unless\n" +
			"its serial number is typed, or given with --force. \"heliosctl unbind-ssds\" gives SSDs back; so does a reboot.\n\n" +
			"Behind software controllers: files that are not there are created at --size; files that are there keep\n" +
			"size and content. With --ssd-model the controllers play an SSD from the figures of its data sheet: no\n" +
			"command completes earlier than the model says, and later only where the CPU or the file is slower.\n\n" +
			"With --computed the SSDs store nothing: they hold the given dataset, made with --feature-fn, as if it had been\n" +
			"loaded onto them, and compute its superblocks, rows and checksums when they are read. They cannot be written.\n\n" +
			"Nothing is written to any SSD before \"heliosctl load\".",
	}, 1<<20, hcli.Of[bindArgs](), runBind)
}

// SetOption reads types and sizes.
func (a *bindArgs) SetOption(name, text string) (done bool, err error) {
	switch name {
	case "row-dtype":
		if a.rowType, err = rowtype.Parse(text); err != nil {
			err = errs.Errorf("%v: %w", errs.Key(name), err)
		}
	case "size":
		a.size, err = parseSSDSize(text)
	default:
		return false, nil
	}
	return true, err
}

// bindArgs holds the options of bind-ssds.
type bindArgs struct {
	// of NVMe controllers
	allUnused bool     `option:"all-unused" usage:"every NVMe SSD that nobody uses and that holds nobody's data"`
	force     []string `option:"force" arg:"SERIAL[,SERIAL…]" usage:"take the SSDs with these SERIAL[,SERIAL…] although they hold data (never what is in use)"`
	group     string   `option:"group" shown:"that of vfio-setup.sh, helios, or the sudo user's" arg:"GROUP" usage:"GROUP whose members may use the SSDs"`
	dryRun    bool     `option:"dry-run" usage:"say what would be done to NVMe SSDs, and change nothing"`
	// of software SSDs
	proxy    []string     `option:"proxy" arg:"PATH[,PATH…]" usage:"files or block devices PATH[,PATH…], a software controller for each"`
	ram      int          `option:"proxy-ram" arg:"N" usage:"N software SSDs in shared memory (/dev/shm)"`
	computed string       `option:"computed" arg:"DATASET" usage:"software SSDs that hold DATASET, which has a feature function, and compute it"`
	count    int          `option:"ssd-count" default:"1" arg:"N" usage:"N SSDs that share the {computed} dataset"`
	rowType  rowtype.Type `option:"row-dtype" text:"yes" oneof:"@row-types" default:"float32" usage:"how {computed} SSDs hold the rows"`
	size     int64        `option:"size" size:"" shown:"computed: as small as can be" arg:"SIZE" usage:"SIZE of each SSD that is created, such as 2GiB"`
	lba      int          `option:"lba" oneof:"512,4096" default:"512" usage:"bytes of a software SSD's logical block"`
	buffered bool         `option:"buffered" usage:"go through the page cache instead of O_DIRECT (proxied files only)"`
	model    string       `option:"ssd-model" offers:"@ssd-models" arg:"MODEL" usage:"take no less time than MODEL: {@ssd-models}, or a YAML file"`
}

func parseSSDSize(text string) (int64, error) {
	size, err := units.ParseBytes(text)
	if err != nil {
		return 0, errs.New(errs.Usage, "{size}: %w", err)
	}
	if size < minSSD || size%4096 != 0 {
		return 0, errs.New(errs.Usage, "{size} %s is not a multiple of 4096 bytes of at least %s",
			text, units.FormatBytes(minSSD))
	}
	return size, nil
}

// binder takes SSDs into use.
type binder struct {
	*env
	*bindArgs
}

// minSSD holds the superblocks and some data.
const minSSD = 1 << 20

// wholeSSD are names that --proxy does not take.
var wholeSSD = regexp.MustCompile(`^(/dev/)?nvme[0-9]+$`)

func runBind(ctx context.Context, e *env, a *bindArgs) error {
	b := &binder{e, a}
	real := e.c.NArg() > 0 || a.allUnused
	if f := e.given(&a.proxy, &a.ram, &a.computed, &a.count, &a.rowType, &a.size, &a.lba,
		&a.buffered, &a.model); real && f != "" {
		return errs.New(errs.Usage,
			"%v is for software SSDs, not for NVMe controllers; bind them one after the other", errs.Key(f))
	}
	if f := e.given(&a.allUnused, &a.force, &a.group, &a.dryRun); !real && f != "" {
		return errs.New(errs.Usage,
			"%v is for NVMe SSDs: name one by PCI address, serial number or /dev/nvmeXnY, or give {all-unused}",
			errs.Key(f))
	}
	if real {
		if e.c.NArg() > 0 && a.allUnused {
			return errs.New(errs.Usage, "SSDs and {all-unused} together; give one of them")
		}
		return b.bindControllers(ctx, e.c.Args().Slice())
	}
	if err := b.checkSoftware(); err != nil {
		return err
	}
	model, err := modelToBind(a.model, e.given(&a.model) != "", a.lba)
	if err != nil {
		return err
	}
	if e.given(&a.computed) != "" {
		return b.bindComputed(ctx, model)
	}
	return b.bindFiles(ctx, model)
}

// checkSoftware refuses options of software SSDs that do not go together.
func (b *binder) checkSoftware() error {
	for _, p := range b.proxy {
		if _, ok := pci.Address(p); ok || wholeSSD.MatchString(p) {
			return errs.New(errs.Usage,
				"{proxy} %s: that is a whole SSD, which is bound by VFIO; leave {proxy} out: \"sudo heliosctl bind-ssds %s\"",
				p, p)
		}
	}
	files, ram := len(b.proxy) > 0, b.given(&b.ram) != ""
	computed := b.given(&b.bindArgs.computed) != ""
	if f := b.given(&b.count, &b.rowType); f != "" && !computed {
		return errs.New(errs.Usage, "%v is for {computed} DATASET", errs.Key(f))
	}
	switch {
	case computed && (files || ram):
		return errs.New(errs.Usage,
			"{computed} together with {proxy} or {proxy-ram}; bind them one after the other")
	case computed && b.buffered:
		return errs.New(errs.Usage,
			"{buffered} is for {proxy}; what is computed has no page cache beneath it")
	case computed:
		return nil
	case files && ram:
		return errs.New(errs.Usage,
			"{proxy} and {proxy-ram} together; bind them one after the other")
	case files:
		return nil
	case !ram:
		return errs.New(errs.Usage,
			"no SSDs; name NVMe SSDs (\"heliosctl ssds\" lists them) or give {all-unused}, {proxy} PATH[,PATH…], {proxy-ram} N or {computed} DATASET")
	case b.ram < 1 || b.ram > 64:
		return errs.New(errs.Usage, "{proxy-ram} %d is not between 1 and 64", b.ram)
	case b.buffered:
		return errs.New(errs.Usage,
			"{buffered} is for {proxy}; shared memory has no page cache beneath it")
	}
	return nil
}

// bindFiles binds software SSDs over files, block devices or shared memory, all or none.
func (b *binder) bindFiles(ctx context.Context, model boundModel) error {
	e, a, paths := b.env, b.bindArgs, b.proxy
	kind := state.KindProxy
	if len(paths) == 0 {
		kind = state.KindRAM
		if a.size == 0 {
			return errs.New(errs.Usage, "{proxy-ram} needs {size} SIZE, such as {size} 512MiB")
		}
	}
	var bound []state.SSD
	var created []string
	err := e.store.Update(ctx, func(st *state.State) error {
		if kind == state.KindRAM {
			paths = ramPaths(e.store.Dir(), a.ram, st)
		}
		for _, p := range paths {
			d, err := b.describe(st, bound, p, kind)
			if err != nil {
				return err
			}
			if d.Created {
				created = append(created, d.Path)
			}
			if err := model.bind(&d); err != nil {
				return err
			}
			st.SSDs = append(st.SSDs, d)
			bound = append(bound, d)
			if err := ctx.Err(); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		for _, p := range created { // all or nothing
			_ = os.Remove(p)
		}
		return err
	}
	return showSoftware(e, bound)
}

// showSoftware lists software SSDs that were just bound.
func showSoftware(e *env, bound []state.SSD) error {
	rows := make([][]string, len(bound))
	for i, d := range bound {
		what := "as it was"
		if d.Created {
			what = "created"
		} else if d.Kind == state.KindComputed {
			what = "none"
		}
		rows[i] = []string{d.Name, d.Kind, d.Serial, units.FormatBytes(d.Bytes),
			strconv.Itoa(d.LBABytes), modelName(d), what, d.Path}
		if err := e.ui.Event("bound", d); err != nil {
			return err
		}
	}
	e.ui.Table([]string{"SSD", "kind", "serial", "size", "LBA", "modelled", "file", "path"}, rows)
	return nil
}

// unbound refuses a path to what is bound already under this name or another: a link, a loop device
// over the file, the disk of a partition, another path to the namespace.
func (b *binder) unbound(st *state.State, now []state.SSD, path, abs string) error {
	records, err := b.store.Machine().Records()
	if err != nil {
		return err
	}
	mine, err := diskuse.BackingOf(b.machine.Sys, abs)
	if errors.Is(err, fs.ErrNotExist) {
		mine = diskuse.Backing{}
	} else if err != nil {
		return errs.New(errs.Usage, "{proxy}: %w; name a file or block device that can be opened",
			err)
	}
	for _, d := range st.SSDs {
		theirs, err := b.machine.Backing(d, records)
		// One whose file is gone has none.
		if d.Path != abs && (err != nil || !mine.Overlaps(theirs)) || d.Kind == state.KindComputed {
			continue
		}
		also := ""
		if d.Path != abs {
			also = " (" + d.Path + " leads to the same)"
		}
		if slices.ContainsFunc(now, func(n state.SSD) bool { return n.Name == d.Name }) {
			return errs.New(errs.Usage, "{proxy} %s names the same file twice%s; name each once",
				path, also)
		}
		return errs.New(errs.Usage,
			"{proxy} %s is bound already as %s%s; leave it out, or \"heliosctl unbind-ssds %s\" first",
			path, d.Name, also, d.Name)
	}
	return b.machine.SolePath("--proxy "+path, mine, records)
}

// describe checks one path, creating the file where there is none, and describes the SSD. now are
// the SSDs of the same command.
func (b *binder) describe(st *state.State, now []state.SSD, path, kind string) (state.SSD,
	error) {
	size, lba := b.size, b.lba
	abs, err := filepath.Abs(path)
	if err != nil {
		return state.SSD{}, errs.New(errs.Usage, "{proxy} %s: %w", path, err)
	}
	if real, err := filepath.EvalSymlinks(abs); err == nil {
		abs = real // one file under two names is one SSD
	}
	fi, err := os.Stat(abs)
	if err := b.unbound(st, now, path, abs); err != nil {
		return state.SSD{}, err
	}
	d := state.SSD{Name: st.NextName(), Kind: kind, Path: abs, Serial: newSerial(), LBABytes: lba,
		Buffered: b.buffered, Bound: time.Now().UTC().Truncate(time.Second)}
	switch {
	case errors.Is(err, fs.ErrNotExist):
		if err := createBacking(path, abs, size); err != nil {
			return state.SSD{}, err
		}
		d.Created = true
		if d.ID, d.Bytes, err = identify(abs, 0); err != nil {
			err = errors.Join(err, os.Remove(abs))
		}
		return d, err
	case err != nil:
		return state.SSD{}, errs.New(errs.Usage,
			"{proxy}: %w; name a file or block device that can be opened", err)
	case fi.Mode().IsRegular():
		if d.ID, d.Bytes, err = identify(abs, 0); err != nil {
			return state.SSD{}, err
		}
	case fi.Mode()&fs.ModeDevice != 0 && fi.Mode()&fs.ModeCharDevice == 0:
		if d.ID, d.Bytes, err = claimBlockDevice(abs); err != nil {
			return state.SSD{}, err
		}
	default:
		return state.SSD{}, errs.New(errs.Usage, "{proxy} %s is neither a file nor a block device",
			path)
	}
	if size != 0 && d.Bytes != size {
		return state.SSD{}, errs.New(errs.Refused,
			"{proxy} %s is there with %d bytes, not {size}'s %d; leave {size} out to use it as it is, or name another file",
			path, d.Bytes, size)
	}
	if d.Bytes < minSSD || d.Bytes%int64(lba) != 0 {
		return state.SSD{}, errs.New(errs.Usage,
			"{proxy} %s has %d bytes, which is not a multiple of {lba} %d of at least %s; name another file",
			path, d.Bytes, lba, units.FormatBytes(minSSD))
	}
	return d, nil
}

// createBacking makes the file of a software SSD.
func createBacking(path, abs string, size int64) error {
	if size == 0 {
		return errs.New(errs.Usage, "{proxy} %s is not there; give {size} SIZE to create it", path)
	}
	err := proxy.Create(abs, size)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return errs.New(errs.Usage,
			"{proxy} %s: there is no folder %s; make it first, or name another file", path,
			filepath.Dir(abs))
	case errors.Is(err, fs.ErrPermission), errors.Is(err, unix.EROFS):
		return errs.New(errs.Usage,
			"{proxy} %s: %w; name a file in a folder that can be written", path, err)
	case errors.Is(err, unix.ENOSPC): // not the user's mistake
		return errs.With(errs.Failed, err)
	}
	return err
}

// identify opens a file or block device and returns its identity and size.
func identify(path string, flags int) (fileid.ID, int64, error) {
	f, err := os.OpenFile(path, os.O_RDONLY|unix.O_NONBLOCK|flags, 0)
	if errors.Is(err, unix.EBUSY) {
		return fileid.ID{}, 0, errs.New(errs.Refused,
			"block device %s is in use: mounted, swap, or held by RAID or LVM; choose one that nobody uses",
			path)
	}
	if err != nil {
		return fileid.ID{}, 0, errs.New(errs.Usage,
			"{proxy}: %w; name a file or block device that can be opened", err)
	}
	defer f.Close() //nolint:errcheck // only read
	id, bytes, err := fileid.Of(f)
	if err != nil {
		return id, 0, errs.New(errs.Usage, "{proxy}: %w", err)
	}
	return id, bytes, nil
}

// claimBlockDevice identifies a block device that nobody uses. O_EXCL asks the kernel,
// which says EBUSY for a device (or one with a partition) that is mounted, swapped to, or held
// by RAID, LVM or another device.
func claimBlockDevice(path string) (fileid.ID, int64, error) {
	id, n, err := identify(path, unix.O_EXCL)
	if err != nil {
		return id, 0, err
	}
	base := filepath.Base(path)
	if held, err := os.ReadDir("/sys/class/block/" + base + "/holders"); err == nil &&
		len(held) > 0 {
		return id, 0, errs.New(errs.Refused,
			"block device %s is held by %s; choose one that nobody uses", path, held[0].Name())
	}
	return id, n, nil
}

// ramPaths names n files in shared memory that no file and no bound SSD has yet. The state
// folder's hash keeps two of them apart.
func ramPaths(dir string, n int, st *state.State) []string {
	sum := sha256.Sum256([]byte(dir))
	var out []string
	for i := 0; len(out) < n; i++ {
		p := fmt.Sprintf("/dev/shm/heliosctl-%d-%s-%d", os.Getuid(), hex.EncodeToString(sum[:4]), i)
		if _, err := os.Lstat(p); err == nil {
			continue
		}
		if _, err := st.Find(p); err == nil {
			continue
		}
		out = append(out, p)
	}
	return out
}

// newSerial is a random serial number of at most 20 characters, the room that Identify
// Controller has.
func newSerial() string {
	b := make([]byte, 6)
	_, _ = rand.Read(b) // never fails (crypto/rand)
	return "HELIOS" + strings.ToUpper(hex.EncodeToString(b))
}
