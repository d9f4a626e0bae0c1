// kwok's controllers without its server, which plays the kubelets' part: nothing here asks a fake pod for its logs.
package main

import (
	"context"
	"fmt"
	"os"

	"github.com/spf13/pflag"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/utils/clock"
	"sigs.k8s.io/kwok/pkg/apis/internalversion"
	"sigs.k8s.io/kwok/pkg/client/clientset/versioned"
	"sigs.k8s.io/kwok/pkg/config"
	"sigs.k8s.io/kwok/pkg/consts"
	"sigs.k8s.io/kwok/pkg/kwok/controllers"
	"sigs.k8s.io/kwok/pkg/log"
	"sigs.k8s.io/kwok/pkg/utils/client"
	"sigs.k8s.io/kwok/pkg/utils/signals"
	"sigs.k8s.io/kwok/pkg/utils/slices"
)

func main() {
	if err := run(signals.SetupSignalContext()); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func run(ctx context.Context) error {
	early := pflag.NewFlagSet("early", pflag.ContinueOnError)
	early.ParseErrorsAllowlist.UnknownFlags = true
	early.Usage = func() {}
	ctx, _ = log.InitFlags(ctx, early)
	ctx, err := config.InitFlags(ctx, early)
	if err != nil {
		return err
	}

	options := config.GetKwokConfiguration(ctx).Options
	flags := pflag.NewFlagSet("kwok", pflag.ExitOnError)
	flags.AddFlagSet(early)
	version := flags.Bool("version", false, "say it and end")
	kubeconfig := flags.String("kubeconfig", "", "of the cluster whose nodes are played")
	flags.StringVar(
		&options.ManageNodesWithAnnotationSelector,
		"manage-nodes-with-annotation-selector",
		options.ManageNodesWithAnnotationSelector,
		"which nodes are played",
	)
	flags.UintVar(
		&options.NodeLeaseDurationSeconds,
		"node-lease-duration-seconds",
		options.NodeLeaseDurationSeconds,
		"for how long a node's lease lasts",
	)
	if err := flags.Parse(os.Args[1:]); err != nil {
		return err
	}
	if *version {
		fmt.Println("kwok version v" + consts.Version)
		return nil
	}
	if err := play(ctx, *kubeconfig, options); err != nil {
		return err
	}
	<-ctx.Done()
	return nil
}

func play(ctx context.Context, kubeconfig string, options internalversion.KwokConfigurationOptions) error {
	id, err := controllers.Identity()
	if err != nil {
		return err
	}
	clients, err := client.NewClientset("", kubeconfig)
	if err != nil {
		return err
	}
	restConfig, err := clients.ToRESTConfig()
	if err != nil {
		return err
	}
	dynamicClient, err := clients.ToDynamicClient()
	if err != nil {
		return err
	}
	restMapper, err := clients.ToRESTMapper()
	if err != nil {
		return err
	}
	restClient, err := rest.RESTClientFor(restConfig)
	if err != nil {
		return err
	}
	typedClient, err := kubernetes.NewForConfig(restConfig)
	if err != nil {
		return err
	}
	typedKwokClient, err := versioned.NewForConfig(restConfig)
	if err != nil {
		return err
	}
	stages := slices.GroupBy(
		config.FilterWithTypeFromContext[*internalversion.Stage](ctx),
		func(stage *internalversion.Stage) internalversion.StageResourceRef { return stage.Spec.ResourceRef },
	)
	controller, err := controllers.NewController(controllers.Config{
		Clock:                             clock.RealClock{},
		DynamicClient:                     dynamicClient,
		RESTClient:                        restClient,
		RESTMapper:                        restMapper,
		ImpersonatingDynamicClient:        clients.ToImpersonatingDynamicClient(),
		ImpersonatingTypedClient:          clients.ToImpersonatingTypedClient(),
		TypedClient:                       typedClient,
		TypedKwokClient:                   typedKwokClient,
		ManageNodesWithAnnotationSelector: options.ManageNodesWithAnnotationSelector,
		CIDR:                              options.CIDR,
		NodeIP:                            options.NodeIP,
		NodeName:                          options.NodeName,
		NodePort:                          options.NodePort,
		PodPlayStageParallelism:           options.PodPlayStageParallelism,
		NodePlayStageParallelism:          options.NodePlayStageParallelism,
		LocalStages:                       stages,
		NodeLeaseParallelism:              options.NodeLeaseParallelism,
		NodeLeaseDurationSeconds:          options.NodeLeaseDurationSeconds,
		ID:                                id,
		PodsOnNodeSyncParallelism:         options.PodsOnNodeSyncParallelism,
		EnablePodsOnNodeSyncListPager:     options.EnablePodsOnNodeSyncListPager,
		EnablePodsOnNodeSyncStreamWatch:   options.EnablePodsOnNodeSyncStreamWatch,
	})
	if err != nil {
		return err
	}
	return controller.Start(ctx)
}
