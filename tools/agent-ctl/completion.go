package main

import (
	"strings"

	"github.com/spf13/cobra"
)

// completeMethods completes the name of a method, and shows the method's purpose.
func completeMethods(_ *cobra.Command, _ []string, begun string) ([]string, cobra.ShellCompDirective) {
	var names []string
	for _, m := range allMethods() {
		if len(m.Method) >= len(begun) && strings.EqualFold(m.Method[:len(begun)], begun) {
			names = append(names, cobra.CompletionWithDesc(m.Method, about(m.Method)))
		}
	}
	return names, cobra.ShellCompDirectiveNoFileComp
}

// completeConnect completes the flags of the command connect. It cannot complete the part of an
// address after the scheme.
func completeConnect(cmd *cobra.Command) {
	complete := map[string]cobra.CompletionFunc{
		"cmd":            completeMethods,
		"server-address": cobra.FixedCompletions([]string{"vsock://", "hvsock:///", "unix:///", "unix://@/"}, cobra.ShellCompDirectiveNoFileComp|cobra.ShellCompDirectiveNoSpace),
	}
	for _, flag := range []string{"hybrid-vsock-port", "repeat", "interval", "timeout"} {
		complete[flag] = cobra.NoFileCompletions
	}
	for flag, function := range complete {
		if err := cmd.RegisterFlagCompletionFunc(flag, function); err != nil {
			panic(err) // cannot happen: the flag exists
		}
	}
}
