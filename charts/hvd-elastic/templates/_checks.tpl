{{/* Checks before the installation: one sentence each, with what to do. */}}
{{- define "hvd-elastic.check" -}}
{{- include "hvd-elastic.refuseOldValues" . -}}
{{- $job := .Values.job }}{{ $worker := .Values.worker }}{{ $journal := .Values.journal }}{{ $tls := .Values.tls -}}

{{- if not (regexMatch "^[a-z]([-a-z0-9]*[a-z0-9])?$" .Release.Name) -}}
{{- fail (printf "%s can't name a service; give the release a name of a-z, 0-9 and -." .Release.Name) -}}
{{- end -}}
{{- if gt (len .Release.Name) 45 -}}
{{- fail "The name of the release has more than 45 characters, too many for its pods; give a shorter one." -}}
{{- end -}}

{{- if not $job.command -}}
{{- fail "job.command is empty; give the program that trains, as in --set-json 'job.command=[\"python\", \"train.py\"]'." -}}
{{- end -}}
{{- $runs := lookup "batch/v1" "Job" .Release.Namespace (printf "%s-driver" .Release.Name) -}}
{{- if .Values.jobset.enabled -}}
{{- $runs = lookup "jobset.x-k8s.io/v1alpha2" "JobSet" .Release.Namespace .Release.Name -}}
{{- end -}}
{{- if $runs -}}
{{- $before := index ($runs.metadata.annotations | default dict) "hvd-elastic/pod" -}}
{{- if and $before (ne $before (include "hvd-elastic.driverPod" . | sha256sum)) -}}
{{- $text := "The driver of %s runs already, and its command, flags, image and pod can't change; uninstall the release first." -}}
{{- fail (printf $text .Release.Name) -}}
{{- end -}}
{{- $made := list -}}
{{- if not $job.existingSecret }}{{ $made = append $made (include "hvd-elastic.jobSecret" .) }}{{ end -}}
{{- if eq $tls.kind "chart" }}{{ $made = append $made (include "hvd-elastic.tlsSecret" .) }}{{ end -}}
{{- range $made -}}
{{- if not (lookup "v1" "Secret" $.Release.Namespace .) -}}
{{- $text := "The Secret %s is gone, and the running driver would know no worker with another; uninstall the release first." -}}
{{- fail (printf $text .) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- $slots := include "hvd-elastic.slots" . | int -}}
{{- $most := mul (int $worker.number) $slots -}}
{{- if gt (int $job.minWorkers) (int $most) -}}
{{- $text := "job.minWorkers is %d, but %d pods of %d make %d workers; raise worker.number or lower the former." -}}
{{- fail (printf $text (int $job.minWorkers) (int $worker.number) $slots $most) -}}
{{- end -}}
{{- if and $job.maxWorkers (lt (int $job.maxWorkers) (int $job.minWorkers)) -}}
{{- $text := "job.maxWorkers is %d, but job.minWorkers %d; raise the former or lower the latter." -}}
{{- fail (printf $text (int $job.maxWorkers) (int $job.minWorkers)) -}}
{{- end -}}
{{- if and $job.checkpointDir (not $job.workingDir) (not (regexMatch "^(/|[a-z][a-z0-9+.-]*:)" $job.checkpointDir)) -}}
{{- $text := "job.checkpointDir is %s, a folder of each pod's own; give the whole path of one that all pods share, or a URL." -}}
{{- fail (printf $text $job.checkpointDir) -}}
{{- end -}}
{{- if regexMatch ":[^/]*$" .Values.image.repository -}}
{{- fail (printf "image.repository is %s, with a tag; give that in image.tag." .Values.image.repository) -}}
{{- end -}}
{{- $ours := list "ELASTIC_GRACE_SECONDS" "ELASTIC_READY_FILE" "NODE_NAME" "POD_IP" "POD_NAME" "POD_NAMESPACE" -}}
{{- range $job.env -}}
{{- if has .name $ours }}{{ fail (printf "job.env gives %s, which the chart sets; leave it out." .name) }}{{ end -}}
{{- if eq .name "ELASTIC_JOB_SECRET" -}}
{{- fail "job.env gives ELASTIC_JOB_SECRET, which others could read; put the secret into job.existingSecret." -}}
{{- end -}}
{{- if and (eq .name "ELASTIC_ETCD_PASSWORD") .value -}}
{{- fail "job.env gives ELASTIC_ETCD_PASSWORD, which others could read; name its Secret in journal.etcd.passwordSecret." -}}
{{- end -}}
{{- end -}}

{{- $limits := ($worker.resources | default .Values.resources).limits | default dict -}}
{{- if and $worker.gpus (hasKey $limits $worker.gpuResource) -}}
{{- fail (printf "%s is in worker.gpus and in the limits of resources; give one of them." $worker.gpuResource) -}}
{{- end -}}
{{- if and $worker.rdma.resource (lt (int $worker.rdma.count) 1) -}}
{{- fail "worker.rdma.resource is given with a count of 0; give worker.rdma.count, or leave the resource out." -}}
{{- end -}}
{{- if and $worker.hostNetwork (kindIs "bool" $worker.onePerNode) (not $worker.onePerNode) -}}
{{- fail "worker.hostNetwork makes pods of a node share ports; leave worker.onePerNode out, or set it to true." -}}
{{- end -}}
{{- if and $worker.hostNetwork .Values.networkPolicy.enabled -}}
{{- fail "A NetworkPolicy can't name pods with worker.hostNetwork; turn one of networkPolicy.enabled and it off." -}}
{{- end -}}

{{- $flags := list "--kubernetes" "--job" "--min-np" "--min-num-proc" "--max-np" "--max-num-proc" "--slots-per-host" -}}
{{- $flags = concat $flags (list "--driver-port" "--secret-file" "--tls-cert" "--tls-key" "--tls-ca" "--journal") -}}
{{- $flags = concat $flags (list "--resume" "--etcd" "--etcd-user" "--etcd-ca" "--etcd-cert" "--etcd-key" "--") -}}
{{- $flags = concat $flags (list "--checkpoint-dir" "--metrics-host" "--metrics-port" "--host" "--driver" "--slots") -}}
{{- $flags = concat $flags (list "--kubernetes-selector" "--kubernetes-namespace" "--kubernetes-service") -}}
{{- $flags = concat $flags (list "--grace" "--ready-file") -}}
{{- range concat .Values.driver.flags $worker.flags -}}
{{- if has (splitList "=" . | first) $flags -}}
{{- fail (printf "%s stands in driver.flags or worker.flags; use the value of the chart for it." .) -}}
{{- end -}}
{{- end -}}

{{- if .Values.jobset.enabled -}}
{{- if gt (len .Release.Name) 40 -}}
{{- fail "The name of the release has more than 40 characters, too many for the pods of a JobSet; give a shorter one." -}}
{{- end -}}
{{- $jobs := int .Values.jobset.jobs -}}
{{- if or (lt (int $worker.number) $jobs) (mod (int $worker.number) $jobs) -}}
{{- $text := "worker.number is %d, which %d Jobs of the JobSet can't share evenly; give a multiple of jobset.jobs." -}}
{{- fail (printf $text (int $worker.number) $jobs) -}}
{{- end -}}
{{- if .Values.kueue.driverQueue -}}
{{- fail "kueue.driverQueue is given, but a JobSet is admitted as a whole; leave it out, or turn jobset.enabled off." -}}
{{- end -}}
{{- else if or .Values.jobset.exclusiveTopology (ne (int .Values.jobset.jobs) 1) -}}
{{- fail "jobset.jobs or jobset.exclusiveTopology is given, but jobset.enabled is off; turn it on, or leave them out." -}}
{{- end -}}

{{- with .Values.kueue -}}
{{- if and (not .queue) (or .priorityClass .driverQueue) -}}
{{- fail "kueue.priorityClass or kueue.driverQueue is given, but kueue.queue is empty; give the queue of the workers." -}}
{{- end -}}
{{- end -}}

{{- $kinds := list "volume" "emptyDir" "etcd" "none" -}}
{{- if not (has $journal.kind $kinds) -}}
{{- fail (printf "journal.kind is %q; give one of %s." $journal.kind (join ", " $kinds)) -}}
{{- end -}}
{{- if and (eq $journal.kind "etcd") (not $journal.etcd.endpoints) -}}
{{- fail "journal.kind is etcd, but journal.etcd.endpoints is empty; give its members, as in {etcd-0.etcd:2379}." -}}
{{- end -}}
{{- if and $journal.etcd.endpoints (ne $journal.kind "etcd") -}}
{{- fail "journal.etcd.endpoints is given, but journal.kind is not etcd; set it to etcd, or leave the former out." -}}
{{- end -}}
{{- if and $journal.existingClaim (ne $journal.kind "volume") -}}
{{- fail "journal.existingClaim is given, but journal.kind is not volume; set it so, or leave the former out." -}}
{{- end -}}
{{- if and $journal.etcd.user (not $journal.etcd.passwordSecret.name) -}}
{{- fail "journal.etcd.user is given without a password; give journal.etcd.passwordSecret.name." -}}
{{- end -}}
{{- if and $journal.etcd.clientCertificate (not $journal.etcd.tlsSecret) -}}
{{- fail "journal.etcd.clientCertificate is set, but journal.etcd.tlsSecret is empty; give the Secret it is in." -}}
{{- end -}}

{{- $kinds = list "none" "certManager" "chart" "existing" -}}
{{- if not (has $tls.kind $kinds) -}}
{{- fail (printf "tls.kind is %q; give one of %s." $tls.kind (join ", " $kinds)) -}}
{{- end -}}
{{- if and (eq $tls.kind "existing") (not $tls.existingSecret) -}}
{{- fail "tls.kind is existing, but tls.existingSecret is empty; name the Secret with tls.crt, tls.key and ca.crt." -}}
{{- end -}}
{{- if and $tls.existingSecret (ne $tls.kind "existing") -}}
{{- fail "tls.existingSecret is given, but tls.kind is not existing; set it to existing, or leave the former out." -}}
{{- end -}}

{{- if and (not .Values.metrics.enabled) (or .Values.metrics.podMonitor.enabled .Values.metrics.dashboard.enabled) -}}
{{- fail "A PodMonitor and a dashboard need metrics; set metrics.enabled." -}}
{{- end -}}
{{- if eq (int .Values.metrics.port) 4711 -}}
{{- fail "metrics.port is 4711, which the driver listens on for agents; give another." -}}
{{- end -}}
{{- with .Values.disruptionBudget -}}
{{- if and .enabled (gt (int .minAvailable) (int $worker.number)) -}}
{{- fail "disruptionBudget.minAvailable is more than worker.number; lower it, or no pod could ever be evicted." -}}
{{- end -}}
{{- end -}}
{{- if and (not .Values.serviceAccount.create) (not .Values.serviceAccount.name) -}}
{{- fail "serviceAccount.create is off and serviceAccount.name is empty; name the service account of the driver." -}}
{{- end -}}
{{- end }}
