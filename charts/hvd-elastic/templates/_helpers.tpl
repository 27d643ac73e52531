{{/* Labels of selectors and pods, which never change. Takes the root and a component. */}}
{{- define "hvd-elastic.selector" -}}
{{- $ := index . 0 -}}
app.kubernetes.io/name: hvd-elastic
app.kubernetes.io/instance: {{ $.Release.Name | quote }}
app.kubernetes.io/component: {{ index . 1 }}
{{- end }}

{{/* Labels of an object. Takes the root and a component. */}}
{{- define "hvd-elastic.labels" -}}
{{- $ := index . 0 -}}
{{ include "hvd-elastic.selector" . }}
app.kubernetes.io/managed-by: {{ $.Release.Service }}
helm.sh/chart: {{ $.Chart.Name }}-{{ $.Chart.Version | replace "+" "_" }}
{{- end }}

{{/* Labels of pods: without the chart's version, because a Job's pods can't be changed. Takes root, component, more labels. */}}
{{- define "hvd-elastic.podLabels" -}}
{{- $ := index . 0 -}}
{{ include "hvd-elastic.selector" . }}
app.kubernetes.io/managed-by: {{ $.Release.Service }}
{{- with index . 2 }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{/* Labels by which Kueue queues an object. */}}
{{- define "hvd-elastic.queueLabels" -}}
{{- with .Values.kueue -}}
{{- if .queue -}}
kueue.x-k8s.io/queue-name: {{ .queue | quote }}
{{- if .priorityClass }}
kueue.x-k8s.io/priority-class: {{ .priorityClass | quote }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}

{{- define "hvd-elastic.serviceAccount" -}}
{{ .Values.serviceAccount.name | default (printf "%s-driver" .Release.Name) }}
{{- end }}

{{- define "hvd-elastic.jobSecret" -}}
{{ .Values.job.existingSecret | default (printf "%s-job" .Release.Name) }}
{{- end }}

{{- define "hvd-elastic.tlsSecret" -}}
{{ if eq .Values.tls.kind "existing" }}{{ .Values.tls.existingSecret }}{{ else }}{{ .Release.Name }}-tls{{ end }}
{{- end }}

{{- define "hvd-elastic.image" -}}
{{- $tag := .Values.image.tag | default (ternary "" .Chart.AppVersion (ne .Values.image.digest "")) -}}
{{ .Values.image.repository }}
{{- with $tag }}:{{ . }}{{ end }}
{{- with .Values.image.digest }}@{{ . }}{{ end }}
{{- end }}

{{/* Requests and limits as JSON: numbers as text, because some servers accept nothing else in fields with owners. */}}
{{- define "hvd-elastic.quantities" -}}
{{- $resources := deepCopy . -}}
{{- range $kind := list "limits" "requests" -}}
{{- $texts := dict -}}
{{- range $name, $quantity := get $resources $kind | default dict -}}
{{- $_ := set $texts $name (toString $quantity) -}}
{{- end -}}
{{- if $texts }}{{ $_ := set $resources $kind $texts }}{{ end -}}
{{- end -}}
{{- toJson $resources -}}
{{- end }}

{{/* Resources of a worker's container: JSON. */}}
{{- define "hvd-elastic.workerResources" -}}
{{- $resources := deepCopy (.Values.worker.resources | default .Values.resources | default dict) -}}
{{- $limits := $resources.limits | default dict -}}
{{- if .Values.worker.gpus -}}
{{- $_ := set $limits .Values.worker.gpuResource (int .Values.worker.gpus) -}}
{{- end -}}
{{- with .Values.worker.rdma -}}
{{- if .resource }}{{ $_ := set $limits .resource (int .count) }}{{ end -}}
{{- end -}}
{{- if $limits }}{{ $_ := set $resources "limits" $limits }}{{ end -}}
{{- include "hvd-elastic.quantities" $resources -}}
{{- end }}

{{/* GPUs of a worker's pod, by its resources. */}}
{{- define "hvd-elastic.gpusSeen" -}}
{{- $seen := 0 -}}
{{- $resources := include "hvd-elastic.workerResources" . | fromJson -}}
{{- range $name, $count := $resources.limits | default dict -}}
{{- if hasSuffix "/gpu" $name }}{{ $seen = add $seen (int $count) }}{{ end -}}
{{- end -}}
{{- $seen -}}
{{- end }}

{{/* Worker processes of one pod. */}}
{{- define "hvd-elastic.slots" -}}
{{- .Values.worker.slots | default (max 1 .Values.worker.gpus (include "hvd-elastic.gpusSeen" . | int)) | int -}}
{{- end }}

{{/* Pods that job.minWorkers needs. */}}
{{- define "hvd-elastic.minPods" -}}
{{- $slots := include "hvd-elastic.slots" . | int -}}
{{- div (sub (add (int .Values.job.minWorkers) $slots) 1) $slots -}}
{{- end }}

{{/* Flags for the connection to etcd: JSON. */}}
{{- define "hvd-elastic.etcdFlags" -}}
{{- $etcd := .Values.journal.etcd -}}
{{- $flags := list "--etcd" (join "," $etcd.endpoints) -}}
{{- with $etcd.user }}{{ $flags = concat $flags (list "--etcd-user" .) }}{{ end -}}
{{- if $etcd.tlsSecret -}}
{{- $flags = concat $flags (list "--etcd-ca" "/run/hvd-elastic/etcd/ca.crt") -}}
{{- if $etcd.clientCertificate -}}
{{- $flags = concat $flags (list "--etcd-cert" "/run/hvd-elastic/etcd/tls.crt") -}}
{{- $flags = concat $flags (list "--etcd-key" "/run/hvd-elastic/etcd/tls.key") -}}
{{- end -}}
{{- end -}}
{{- toJson $flags -}}
{{- end }}

{{/* Flags for the authentication of driver and agents: JSON. */}}
{{- define "hvd-elastic.securityFlags" -}}
{{- $flags := list "--secret-file" "/run/hvd-elastic/secret/job.secret" -}}
{{- if ne .Values.tls.kind "none" -}}
{{- $flags = concat $flags (list "--tls-cert" "/run/hvd-elastic/tls/tls.crt") -}}
{{- $flags = concat $flags (list "--tls-key" "/run/hvd-elastic/tls/tls.key") -}}
{{- $flags = concat $flags (list "--tls-ca" "/run/hvd-elastic/tls/ca.crt") -}}
{{- end -}}
{{- toJson $flags -}}
{{- end }}

{{/* Arguments of elasticrun. */}}
{{- define "hvd-elastic.driverArguments" -}}
{{- $job := .Values.job -}}
{{- $args := list "--kubernetes" "--job" .Release.Name "--min-np" ($job.minWorkers | int | toString) -}}
{{- with $job.maxWorkers }}{{ $args = concat $args (list "--max-np" (. | int | toString)) }}{{ end -}}
{{- $slots := include "hvd-elastic.slots" . -}}
{{- if not .Values.rbac.create -}}
{{- $args = concat $args (list "--kubernetes-service" (printf "%s-workers" .Release.Name) "--slots-per-host" $slots) -}}
{{- else if ne (int $slots) (max 1 (include "hvd-elastic.gpusSeen" . | int) | int) -}}
{{- $args = concat $args (list "--slots-per-host" $slots) -}}
{{- end -}}
{{- $args = concat $args (include "hvd-elastic.securityFlags" . | fromJsonArray) (list "--driver-port" "4711") -}}
{{- if eq .Values.journal.kind "etcd" -}}
{{- $args = concat $args (include "hvd-elastic.etcdFlags" . | fromJsonArray) (list "--resume") -}}
{{- else if ne .Values.journal.kind "none" -}}
{{- $args = concat $args (list "--journal" "/run/hvd-elastic/journal/journal" "--resume") -}}
{{- end -}}
{{- with $job.checkpointDir }}{{ $args = concat $args (list "--checkpoint-dir" .) }}{{ end -}}
{{- with .Values.metrics -}}
{{- if .enabled -}}
{{- $args = concat $args (list "--metrics-host" .host "--metrics-port" (.port | int | toString)) -}}
{{- end -}}
{{- end -}}
{{- toYaml (concat $args .Values.driver.flags (list "--") $job.command) -}}
{{- end }}

{{/* Arguments of elasticrun, for an agent. */}}
{{- define "hvd-elastic.agentArguments" -}}
{{- $args := list "agent" "--job" .Release.Name "--host" "$(POD_IP)" -}}
{{- if eq .Values.journal.kind "etcd" -}}
{{- $args = concat $args (include "hvd-elastic.etcdFlags" . | fromJsonArray) -}}
{{- else -}}
{{- $args = concat $args (list "--driver" (printf "%s-driver:4711" .Release.Name)) -}}
{{- end -}}
{{- $args = concat $args (include "hvd-elastic.securityFlags" . | fromJsonArray) -}}
{{- $args = concat $args (list "--slots" (include "hvd-elastic.slots" .)) -}}
{{- toYaml (concat $args .Values.worker.flags) -}}
{{- end }}
