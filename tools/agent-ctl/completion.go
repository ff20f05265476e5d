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

// complete completes the flags of a command that calls an agent. words are those of its flags that
// have a value of the user's own. It cannot complete the part of an address after the scheme.
func complete(cmd *cobra.Command, words ...string) {
	complete := map[string]cobra.CompletionFunc{
		"server-address": cobra.FixedCompletions([]string{"vsock://", "hvsock:///", "unix:///", "unix://@/"}, cobra.ShellCompDirectiveNoFileComp|cobra.ShellCompDirectiveNoSpace),
	}
	if cmd.Flags().Lookup("cmd") != nil {
		complete["cmd"] = completeMethods
	}
	for _, flag := range append(words, "hybrid-vsock-port") {
		complete[flag] = cobra.NoFileCompletions
	}
	for flag, function := range complete {
		if err := cmd.RegisterFlagCompletionFunc(flag, function); err != nil {
			panic(err) // cannot happen: the flag exists
		}
	}
}
