{{/* Values of Horovod's chart without a meaning here, and replacements. The others are unchanged. */}}
{{- define "hvd-elastic.oldValues" -}}
ssh: no ssh is used, as the workers call the driver; leave it out
useHostNetwork: use worker.hostNetwork instead
useHostPID: nothing needs the node's processes; leave it out
annotations: use worker.podAnnotations and driver.podAnnotations instead
capabilities: use worker.ipcLock, or securityContext.capabilities, instead
privileged: use securityContext.privileged instead
serviceType: no service is reached from outside the cluster; leave it out
env: use job.env instead
args: use job.command instead
command: use job.command instead
master: use job.command for the program, image for the image and driver for the pod instead
worker.image: driver and workers have one image, so use image instead
worker.env: use job.env instead, a list of name and value
worker.command: use job.command, which runs in every worker, instead
worker.args: use job.command, which runs in every worker, instead
worker.privileged: use securityContext.privileged instead
{{- end }}

{{- define "hvd-elastic.refuseOldValues" -}}
{{- $old := include "hvd-elastic.oldValues" . | fromYaml -}}
{{- $told := list -}}
{{- range $key, $instead := $old -}}
{{- $given := hasKey $.Values $key -}}
{{- if hasPrefix "worker." $key }}{{ $given = hasKey $.Values.worker (trimPrefix "worker." $key) }}{{ end -}}
{{- if $given }}{{ $told = append $told (printf "%s is a value of Horovod's chart: %s." $key $instead) }}{{ end -}}
{{- end -}}
{{- with $told }}{{ fail (join "\n" .) }}{{ end -}}
{{- end }}
