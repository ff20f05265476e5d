package rescue

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"io"
	"os"
	"strings"
	"unicode"
)

// The positions of the signature and the version in an x86 kernel's file, relative to setupStart
// (Documentation/arch/x86/boot.rst in the kernel's sources).
const (
	headerMagicAt   = 0x202
	headerMagic     = "HdrS"
	versionOffsetAt = 0x20e
	setupStart      = 0x200
	maxVersion      = 128
	setupBytes      = 64 << 10 // the offset has 16 bits
)

// kernelVersion reads the release of a kernel from the kernel's file.
func kernelVersion(path string) (string, error) {
	f, err := os.Open(path)
	if err != nil {
		return "", err
	}
	defer f.Close()
	head, err := io.ReadAll(io.LimitReader(f, setupStart+setupBytes+maxVersion))
	if err != nil {
		return "", err
	}
	return versionIn(head, path)
}

func versionIn(head []byte, path string) (string, error) {
	if !has(head, headerMagicAt, headerMagic) || len(head) < versionOffsetAt+2 {
		return "", fmt.Errorf("%s is not a kernel for x86", path)
	}
	at := setupStart + int(binary.LittleEndian.Uint16(head[versionOffsetAt:]))
	if at >= len(head) {
		return "", fmt.Errorf("%s: its version would lie beyond its end", path)
	}
	text, _, _ := bytes.Cut(head[at:min(len(head), at+maxVersion)], []byte{0})
	release, _, _ := strings.Cut(string(text), " ")
	return printable(release), nil
}

// printable makes untrusted text safe for a terminal: one line, without control characters.
func printable(text string) string {
	return strings.Map(func(r rune) rune {
		if unicode.IsPrint(r) {
			return r
		}
		return ' '
	}, strings.ToValidUTF8(text, "?"))
}
