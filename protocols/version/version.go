// Package version holds the one version that every program of this repository has.
package version

import "runtime/debug"

// Number is the version, by the rules of semver.org, of the release that this source becomes. The release's tag is "v" and
// Number: .ci/dist compares them.
const Number = "0.1.0"

// source is what the linker is given by make: the tag of the commit that was built, or the commit. It is empty in a build
// without git or without make.
var source string

// String is what --version prints, and what the agent answers to Health.Version: Number alone in a release, and
// Number-dev+COMMIT in what is built between two.
func String() string {
	module := ""
	if info, ok := debug.ReadBuildInfo(); ok {
		module = info.Main.Version
	}
	return text(source, module)
}

// text is String of a source and of the module's version, which `go install PACKAGE@VERSION` gives a program.
func text(source, module string) string {
	switch {
	case source == "v"+Number, source == "" && module == "v"+Number:
		return Number
	case source == "":
		return Number + "-dev"
	}
	return Number + "-dev+" + source
}
