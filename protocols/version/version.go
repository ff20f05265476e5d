// Package version holds the one version that every program of this repository has.
package version

// Number is the version by the rules of semver.org: what --version prints, and what the agent answers to Health.Version.
const Number = "0.1.0"
