{{- define "disttrain.name" -}}
{{- $chart := default .Chart.Name .Values.nameOverride }}
{{- if .Values.fullnameOverride }}{{ .Values.fullnameOverride | trunc 52 | trimSuffix "-" }}
{{- else if contains $chart .Release.Name }}{{ .Release.Name | trunc 52 | trimSuffix "-" }}
{{- else }}{{ printf "%s-%s" .Release.Name $chart | trunc 52 | trimSuffix "-" }}
{{- end }}
{{- end }}

{{- define "disttrain.selector" -}}
app.kubernetes.io/name: {{ default "disttrain-operator" .Values.nameOverride }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "disttrain.labels" -}}
{{- $own := dict "app.kubernetes.io/version" .Chart.AppVersion "app.kubernetes.io/managed-by" .Release.Service "helm.sh/chart" (printf "%s-%s" .Chart.Name .Chart.Version) }}
{{- merge $own (include "disttrain.selector" . | fromYaml) (default dict .Values.commonLabels) | toYaml }}
{{- end }}

{{- define "disttrain.serviceAccountName" -}}
{{ default (ternary (include "disttrain.name" .) "default" .Values.serviceAccount.create) .Values.serviceAccount.name }}
{{- end }}

{{/* The reference of an image of the values; given as a list: that, and the root. */}}
{{- define "disttrain.reference" -}}
{{- $image := index . 0 }}{{ $root := index . 1 }}
{{- with default $image.registry (default dict $root.Values.global).imageRegistry }}{{ . }}/{{ end }}{{ $image.repository }}
{{- if $image.digest }}@{{ $image.digest }}{{ else }}:{{ default $root.Chart.AppVersion $image.tag }}{{ end }}
{{- end }}

{{- define "disttrain.image" -}}
{{ include "disttrain.reference" (list .Values.image .) }}
{{- end }}

{{- define "disttrain.trainerImage" -}}
{{ default (include "disttrain.reference" (list .Values.trainer.image .)) .Values.trainerImage }}
{{- end }}

{{/* Of the pod of `helm test`, which the operator's Service must not select. */}}
{{- define "disttrain.testLabels" -}}
app.kubernetes.io/name: {{ default "disttrain-operator" .Values.nameOverride }}-test
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{/* Of the dashboard's pods. Nothing that is for the operator's must select them, also by the instance alone: the jobs'
NetworkPolicies admit that to the agents. */}}
{{- define "disttrain.dashboardSelector" -}}
app.kubernetes.io/name: {{ default "disttrain" .Values.nameOverride | trunc 53 }}-dashboard
app.kubernetes.io/instance: {{ .Release.Name }}-dashboard
{{- end }}

{{- define "disttrain.dashboardLabels" -}}
{{- merge (include "disttrain.dashboardSelector" . | fromYaml) (include "disttrain.labels" . | fromYaml) | toYaml }}
{{- end }}

{{/* The Secret with the key of the jobs' tokens that the operator makes where no other is named. */}}
{{- define "disttrain.tokenKeySecret" -}}
{{ include "disttrain.name" . }}-job-token-key
{{- end }}

{{/* Where the Leases are, with commas between: releases that serve the same jobs share one, whatever namespaces they are installed in. */}}
{{- define "disttrain.leaseNamespaces" -}}
{{ default (list .Values.leaderElection.namespace) .Values.watchNamespaces | uniq | sortAlpha | join "," }}
{{- end }}

{{/* What is laid under the templates of all jobs, as JSON; nothing where that is nothing. */}}
{{- define "disttrain.templateDefaults" -}}
{{- $given := dict }}
{{- range $name := list "annotations" "env" "imagePullSecrets" "labels" "nodeSelector" "priorityClassName" "tolerations" "volumeMounts" "volumes" }}
{{- with get $.Values.podDefaults $name }}{{ $_ := set $given $name . }}{{ end }}
{{- end }}
{{- /* Not as YAML: Helm writes numbers from a million on with an exponent there. */}}
{{- with $given }}{{ toPrettyJson . }}{{ end }}
{{- end }}

{{/* What the operator does to jobs and their children; everything here is used. */}}
{{- define "disttrain.rules" -}}
- apiGroups: [disttrain.io]
  resources: [disttrainingjobs]
  verbs: [get, list, watch, delete]
- apiGroups: [disttrain.io]
  resources: [disttrainingjobs/status]
  verbs: [update]
- apiGroups: [""]
  resources: [pods]
  verbs: [get, list, watch, create, delete]
{{- if .Values.gangGate.enabled }}
- apiGroups: [""]
  resources: [pods]
  verbs: [patch]
- apiGroups: [""]
  resources: [nodes]
  verbs: [get, list, watch]
{{- end }}
- apiGroups: [""]
  resources: [services]
  verbs: [get, list, watch, create]
- apiGroups: [""]
  resources: [secrets]
  verbs: [create]
- apiGroups: [""]
  resources: [persistentvolumeclaims]
  verbs: [get, create]
- apiGroups: [""]
  resources: [events]
  verbs: [list, create]
- apiGroups: [policy]
  resources: [poddisruptionbudgets]
  verbs: [get, create]
{{- if .Values.history.jobs }}
- apiGroups: [""]
  resources: [configmaps]
  verbs: [create]
- apiGroups: [""]
  resources: [configmaps]
  resourceNames: [disttrain-history]
  verbs: [get, patch]
{{- end }}
{{- if .Values.networkPolicy.perJob }}
- apiGroups: [networking.k8s.io]
  resources: [networkpolicies]
  verbs: [get, create]
{{- end }}
{{- if .Values.scheduling.volcano }}
- apiGroups: [scheduling.volcano.sh]
  resources: [podgroups]
  verbs: [get, create]
{{- end }}
{{- if .Values.scheduling.coscheduling }}
- apiGroups: [scheduling.x-k8s.io]
  resources: [podgroups]
  verbs: [get, create]
{{- end }}
{{- end }}
