// One binary that is etcd, the Kubernetes API server, controller manager, scheduler and kubectl, by its first argument,
// or kubectl by its own name.
// The test bed builds it once into a cache folder, so that tests run against the real programs without a download of
// images or of release files.
package main

import (
	"fmt"
	"os"
	"path/filepath"

	"go.etcd.io/etcd/server/v3/etcdmain"
	"k8s.io/component-base/cli"
	kubectl "k8s.io/kubectl/pkg/cmd"
	apiserver "k8s.io/kubernetes/cmd/kube-apiserver/app"
	controllermanager "k8s.io/kubernetes/cmd/kube-controller-manager/app"
	scheduler "k8s.io/kubernetes/cmd/kube-scheduler/app"
)

func main() {
	// A link with this name lets a person type kubectl.
	if filepath.Base(os.Args[0]) == "kubectl" {
		os.Args = append([]string{os.Args[0], "kubectl"}, os.Args[1:]...)
	}
	if len(os.Args) < 2 {
		fail("the first argument names the program: etcd, kube-apiserver, kube-controller-manager, kube-scheduler or kubectl")
	}
	name := os.Args[1]
	// Each program reads its own name and flags from os.Args.
	os.Args = append([]string{name}, os.Args[2:]...)
	switch name {
	case "etcd":
		etcdmain.Main(os.Args)
	case "kube-apiserver":
		os.Exit(cli.Run(apiserver.NewAPIServerCommand()))
	case "kube-controller-manager":
		os.Exit(cli.Run(controllermanager.NewControllerManagerCommand()))
	case "kube-scheduler":
		os.Exit(cli.Run(scheduler.NewSchedulerCommand()))
	case "kubectl":
		// RunNoErrOutput is what kubectl itself uses: its commands print their errors.
		if err := cli.RunNoErrOutput(kubectl.NewDefaultKubectlCommand()); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
	default:
		fail("unknown program " + name)
	}
}

func fail(message string) {
	fmt.Fprintln(os.Stderr, message)
	os.Exit(2)
}
