package main

import (
	"context"
	"os"
	"os/signal"
	"strconv"
	"sync"
	"time"

	"github.com/sirupsen/logrus"
	"golang.org/x/sys/unix"

	"github.com/directvol/directvol/agent/logbuffer"
	"github.com/directvol/directvol/agent/transport"
	"github.com/directvol/directvol/protocols/address"
	"github.com/directvol/directvol/protocols/version"
)

// flushLimit is how long the log's readers have at the end.
const flushLimit = 2 * time.Second

// keptLog is the buffer and the ways out of it.
type keptLog struct {
	*logbuffer.Buffer
	console func()
}

// newLog makes logrus's standard logger, which ttrpc uses too, one that keeps
// lines until it is known where they go.
func newLog() (*logrus.Entry, *keptLog) {
	log := logrus.StandardLogger()
	j := logbuffer.New(log, logrus.Fields{"name": "directvol-agent", "source": "agent", "pid": strconv.Itoa(os.Getpid()), "version": version.String()})
	// Else writing to a console that is gone would end the process. Ignored, the
	// signal would be ignored by what a shell starts too.
	signal.Notify(make(chan os.Signal, 1), unix.SIGPIPE)
	return logrus.NewEntry(log), &keptLog{j, sync.OnceFunc(func() {
		r := j.Reader()
		go r.CopyTo(context.Background(), os.Stderr)
	})}
}

// toConsole has all lines written to the console, from the first one on.
func (k *keptLog) toConsole() { k.console() }

// toVsock has the host read the log on a port, where there is to be one, until
// the process ends. Where that fails the console has it.
func (k *keptLog) toVsock(port uint32, log *logrus.Entry) {
	if port == 0 {
		return
	}
	l, err := transport.ListenStreams(address.Address{Scheme: address.VSock, Port: port}, logbuffer.MaxReaders+1, log)
	if err != nil {
		log.Warnf("the log goes to the console: %v", err)
		k.toConsole()
		return
	}
	go func() {
		err := k.Serve(context.Background(), l)
		log.Warnf("the log goes to the console: %v", err)
		k.toConsole()
	}()
}

// flush lets who reads have what was logged, for a while.
func (k *keptLog) flush() {
	ctx, cancel := context.WithTimeout(context.Background(), flushLimit)
	defer cancel()
	k.Flush(ctx)
}
