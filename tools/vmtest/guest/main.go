// Command guest is PID 1 of tools/vmtest's virtual machines. It mounts the kernel's file systems,
// starts itself again as the agent that answers the host over the second serial port, and reaps
// orphans. It loads no module and binds no device: the kernel's nvme driver has the disks.
package main

import (
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"unsafe"

	"helios/tools/vmtest/agent"
)

const (
	port    = "/dev/ttyS1"
	endLine = agent.EndLine
)

func main() {
	switch {
	case len(os.Args) > 3 && os.Args[1] == "as":
		fail("as", become(os.Args[2], os.Args[3:]))
	case len(os.Args) == 2 && os.Args[1] == "serve":
		fail("agent", serve())
	case os.Getpid() == 1:
		fail("init", initialise())
	default:
		fail("guest",
			fmt.Errorf("this is the init of tools/vmtest's guests; it does nothing elsewhere"))
	}
}

func fail(what string, err error) {
	fmt.Fprintf(os.Stderr, "vmtest %s: %v\n", what, err)
	if os.Getpid() == 1 {
		off()
	}
	os.Exit(125)
}

func off() {
	syscall.Sync()
	_ = syscall.Reboot(syscall.LINUX_REBOOT_CMD_POWER_OFF)
	select {}
}

// initialise is PID 1: it returns when the agent ended, which only a fault does.
func initialise() error {
	mounts := []struct{ kind, dir, data string }{
		{"proc", "/proc", ""}, {"sysfs", "/sys", ""}, {"devtmpfs", "/dev", ""},
		{"devpts", "/dev/pts", "ptmxmode=0666"}, {"tmpfs", "/dev/shm", "mode=1777"},
		{"tmpfs", "/tmp", "mode=1777"}, {"tmpfs", "/run", "mode=0755"},
	}
	for _, m := range mounts {
		if err := os.MkdirAll(m.dir, 0o755); err != nil {
			return err
		}
		if err := syscall.Mount(m.kind, m.dir, m.kind, 0, m.data); err != nil {
			return fmt.Errorf("mount %s at %s: %w", m.kind, m.dir, err)
		}
	}
	if err := syscall.Sethostname([]byte("vmtest")); err != nil {
		return err
	}
	child := exec.Command("/init", "serve")
	child.Stdout, child.Stderr = os.Stdout, os.Stderr
	child.Env = []string{"PATH=" + path}
	if err := child.Start(); err != nil {
		return err
	}
	for {
		var st syscall.WaitStatus
		pid, err := syscall.Wait4(-1, &st, 0, nil)
		if err == syscall.EINTR {
			continue
		}
		if err != nil {
			return fmt.Errorf("wait: %w", err)
		}
		if pid == child.Process.Pid {
			return fmt.Errorf("the agent ended with status %#x", uint32(st))
		}
	}
}

const path = "/bin:/sbin:/usr/bin:/usr/sbin"

func serve() error {
	tty, err := os.OpenFile(port, os.O_RDWR|syscall.O_NOCTTY, 0)
	if err != nil {
		return err
	}
	if err := raw(tty); err != nil {
		return fmt.Errorf("%s: %w", port, err)
	}
	mark, err := logEnd()
	if err != nil {
		return err
	}
	s := &agent.Server{
		Env: []string{"PATH=" + path, "HOME=/root", "USER=root", "LOGNAME=root", "TERM=dumb",
			"LC_ALL=C"},
		As: func(user string, argv []string) ([]string, error) {
			return append([]string{"/init", "as", user}, argv...), nil
		},
		Terminal: terminal,
		Log:      func() ([]byte, error) { return kernelLog(mark) },
		PowerOff: func() {
			fmt.Fprintln(os.Stderr, endLine)
			off()
		},
	}
	return s.Serve(tty)
}

func ioctl(f *os.File, request uintptr, p unsafe.Pointer) error {
	_, _, e := syscall.Syscall(syscall.SYS_IOCTL, f.Fd(), request, uintptr(p))
	runtime.KeepAlive(f)
	if e != 0 {
		return e
	}
	return nil
}

// raw makes the port 8-bit clean, without echo, signals or flow control by characters (cfmakeraw).
func raw(f *os.File) error {
	var t syscall.Termios
	if err := ioctl(f, syscall.TCGETS, unsafe.Pointer(&t)); err != nil {
		return err
	}
	t.Iflag &^= syscall.IGNBRK | syscall.BRKINT | syscall.PARMRK | syscall.ISTRIP |
		syscall.INLCR | syscall.IGNCR | syscall.ICRNL | syscall.IXON
	t.Oflag &^= syscall.OPOST
	t.Lflag &^= syscall.ECHO | syscall.ECHONL | syscall.ICANON | syscall.ISIG | syscall.IEXTEN
	const cbaud = 0o010017
	t.Cflag = t.Cflag&^(syscall.CSIZE|syscall.PARENB|cbaud) |
		syscall.CS8 | syscall.CLOCAL | syscall.B115200
	t.Cc[syscall.VMIN], t.Cc[syscall.VTIME] = 1, 0
	return ioctl(f, syscall.TCSETS, unsafe.Pointer(&t))
}

// terminal opens a pseudo-terminal without echo.
func terminal() (master, slave *os.File, err error) {
	if master, err = os.OpenFile("/dev/ptmx", os.O_RDWR|syscall.O_NOCTTY, 0); err != nil {
		return nil, nil, err
	}
	var unlock, n int32
	if err = ioctl(master, syscall.TIOCSPTLCK, unsafe.Pointer(&unlock)); err == nil {
		err = ioctl(master, syscall.TIOCGPTN, unsafe.Pointer(&n))
	}
	if err == nil {
		slave, err = os.OpenFile("/dev/pts/"+strconv.Itoa(int(n)), os.O_RDWR|syscall.O_NOCTTY, 0)
	}
	var t syscall.Termios
	if err == nil {
		err = ioctl(slave, syscall.TCGETS, unsafe.Pointer(&t))
	}
	if err == nil {
		t.Lflag &^= syscall.ECHO
		t.Oflag &^= syscall.OPOST
		err = ioctl(slave, syscall.TCSETS, unsafe.Pointer(&t))
	}
	if err != nil {
		master.Close()
		return nil, nil, err
	}
	return master, slave, nil
}

// kmsg reads the kernel's records: "priority,sequence,time,flags;text" each.
func kmsg(visit func(priority, sequence int64, text string)) error {
	fd, err := syscall.Open("/dev/kmsg", syscall.O_RDONLY|syscall.O_NONBLOCK, 0)
	if err != nil {
		return fmt.Errorf("/dev/kmsg: %w", err)
	}
	defer syscall.Close(fd)
	buf := make([]byte, 16<<10)
	for {
		n, err := syscall.Read(fd, buf)
		switch err {
		case nil:
		case syscall.EINTR:
			continue
		case syscall.EPIPE: // records were overwritten before they were read
			visit(0, 0, "vmtest: the kernel's log lost records")
			continue
		case syscall.EAGAIN:
			return nil
		default:
			return fmt.Errorf("/dev/kmsg: %w", err)
		}
		head, text, _ := strings.Cut(string(buf[:n]), ";")
		f := strings.SplitN(head, ",", 3)
		if len(f) < 3 {
			continue
		}
		pri, _ := strconv.ParseInt(f[0], 10, 64)
		seq, _ := strconv.ParseInt(f[1], 10, 64)
		text, _, _ = strings.Cut(text, "\n") // what follows is key=value lines
		visit(pri, seq, text)
	}
}

// logEnd is the sequence number of the newest record.
func logEnd() (int64, error) {
	var last int64
	err := kmsg(func(_, seq int64, _ string) { last = max(last, seq) })
	return last, err
}

// kernelLog returns what matters of the kernel's log: warnings and worse since boot, everything
// after mark.
func kernelLog(mark int64) ([]byte, error) {
	var out []byte
	err := kmsg(func(pri, seq int64, text string) {
		if seq > mark || pri&7 <= 4 || seq == 0 {
			out = append(append(out, text...), '\n')
		}
	})
	return out, err
}
