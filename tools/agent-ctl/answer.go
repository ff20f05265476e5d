package main

import (
	"encoding/json"
	"fmt"
	"io"
	"strings"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/directvol/directvol/protocols/agentpb"
	"github.com/directvol/directvol/protocols/output"
	"github.com/directvol/directvol/tools/agent-ctl/message"
)

// printer writes answers: as text, with errors written separately, or as JSON, one object per line.
type printer struct {
	out, errors io.Writer
	json        bool
}

// answer writes the result of a call: the response, or the status of the error.
func (p printer) answer(c call, response proto.Message, st *status.Status) (err error) {
	switch {
	case p.json:
		_, err = fmt.Fprintf(p.out, "%s\n", jsonAnswer(c, response, st))
	case st != nil:
		_, err = fmt.Fprintf(p.errors, "%s: %s: %s\n", c.Method, codeName(st.Code()), message.Printable(st.Message()))
	default:
		_, err = io.WriteString(p.out, textAnswer(c, response))
	}
	return err
}

func jsonAnswer(c call, response proto.Message, st *status.Status) []byte {
	type callError struct {
		Code    string          `json:"code"`
		Message json.RawMessage `json:"message"`
	}
	answer := struct {
		Method   string          `json:"method"`
		Response json.RawMessage `json:"response,omitempty"`
		Error    *callError      `json:"error,omitempty"`
	}{Method: c.Method}
	if st != nil {
		answer.Error = &callError{codeName(st.Code()), message.Quoted(st.Message())}
	} else {
		answer.Response = message.JSON(response)
	}
	text, err := json.Marshal(answer)
	if err != nil {
		panic(err) // cannot happen: it encodes only strings, and the output of package message
	}
	return text
}

const indent = "  "

// textAnswer returns an answer as text: the method's name, and the fields indented below it.
func textAnswer(c call, response proto.Message) string {
	var text string
	switch response := response.(type) {
	case *agentpb.VolumeStatsResponse:
		text = volumeStats(response)
	default:
		text = message.Text(response, indent)
	}
	if text == "" {
		return c.Method + ": OK\n"
	}
	return c.Method + "\n" + text
}

func volumeStats(r *agentpb.VolumeStatsResponse) string {
	var text strings.Builder
	for _, u := range r.Usage {
		fmt.Fprintf(&text, "%s%v\n", indent, output.Usage{Unit: u.Unit.String(), Total: u.Total, Used: u.Used, Available: u.Available})
	}
	if c := r.VolumeCondition; c != nil {
		state := "normal"
		if c.Abnormal {
			state = "abnormal"
		}
		fmt.Fprintf(&text, "%scondition: %s: %s\n", indent, state, message.Printable(c.Message))
	}
	return text.String()
}

// codeNames are the names of gRPC's codes as in google/rpc/code.proto; package codes prints Go's
// names.
var codeNames = [...]string{
	codes.OK:                 "OK",
	codes.Canceled:           "CANCELLED",
	codes.Unknown:            "UNKNOWN",
	codes.InvalidArgument:    "INVALID_ARGUMENT",
	codes.DeadlineExceeded:   "DEADLINE_EXCEEDED",
	codes.NotFound:           "NOT_FOUND",
	codes.AlreadyExists:      "ALREADY_EXISTS",
	codes.PermissionDenied:   "PERMISSION_DENIED",
	codes.ResourceExhausted:  "RESOURCE_EXHAUSTED",
	codes.FailedPrecondition: "FAILED_PRECONDITION",
	codes.Aborted:            "ABORTED",
	codes.OutOfRange:         "OUT_OF_RANGE",
	codes.Unimplemented:      "UNIMPLEMENTED",
	codes.Internal:           "INTERNAL",
	codes.Unavailable:        "UNAVAILABLE",
	codes.DataLoss:           "DATA_LOSS",
	codes.Unauthenticated:    "UNAUTHENTICATED",
}

// codeName returns the name of a code, or its number if gRPC has no such code.
func codeName(code codes.Code) string {
	if int(code) < len(codeNames) {
		return codeNames[code]
	}
	return fmt.Sprintf("CODE_%d", uint32(code))
}
