{{/* Shared parts of the pods of driver and workers: each takes the root and the values of its component. */}}

{{- define "hvd-elastic.podSettings" -}}
{{- $ := index . 0 }}{{ $own := index . 1 -}}
enableServiceLinks: false
terminationGracePeriodSeconds: {{ int $own.graceSeconds }}
{{- with $.Values.podSecurityContext }}
securityContext:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $.Values.image.pullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $own.priorityClassName }}
priorityClassName: {{ . | quote }}
{{- end }}
{{- with $own.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $own.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{- define "hvd-elastic.containerSettings" -}}
image: {{ include "hvd-elastic.image" . | quote }}
imagePullPolicy: {{ .Values.image.pullPolicy }}
{{- with .Values.job.workingDir }}
workingDir: {{ . | quote }}
{{- end }}
{{- with .Values.job.envFrom }}
envFrom:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{- define "hvd-elastic.env" -}}
{{- with .Values.journal -}}
{{- if and (eq .kind "etcd") .etcd.passwordSecret.name -}}
- name: ELASTIC_ETCD_PASSWORD
  valueFrom:
    secretKeyRef:
      name: {{ .etcd.passwordSecret.name | quote }}
      key: {{ .etcd.passwordSecret.key | quote }}
{{ end -}}
{{- end -}}
{{- with .Values.job.env -}}
{{ toYaml . }}
{{- end -}}
{{- end }}

{{- define "hvd-elastic.volumes" -}}
{{- $ := index . 0 }}{{ $own := index . 1 -}}
- name: job-secret
  secret:
    secretName: {{ include "hvd-elastic.jobSecret" $ | quote }}
    defaultMode: 288 # 0440
    items:
      - key: job.secret
        path: job.secret
{{- if ne $.Values.tls.kind "none" }}
- name: tls
  secret:
    secretName: {{ include "hvd-elastic.tlsSecret" $ | quote }}
    defaultMode: 288 # 0440
{{- end }}
{{- if and (eq $.Values.journal.kind "etcd") $.Values.journal.etcd.tlsSecret }}
- name: etcd-tls
  secret:
    secretName: {{ $.Values.journal.etcd.tlsSecret | quote }}
    defaultMode: 288 # 0440
{{- end }}
{{- if $.Values.securityContext.readOnlyRootFilesystem }}
- name: tmp
  emptyDir: {}
{{- end }}
{{- with concat $.Values.volumes $own.volumes }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- define "hvd-elastic.mounts" -}}
{{- $ := index . 0 }}{{ $own := index . 1 -}}
- name: job-secret
  mountPath: /run/hvd-elastic/secret
  readOnly: true
{{- if ne $.Values.tls.kind "none" }}
- name: tls
  mountPath: /run/hvd-elastic/tls
  readOnly: true
{{- end }}
{{- if and (eq $.Values.journal.kind "etcd") $.Values.journal.etcd.tlsSecret }}
- name: etcd-tls
  mountPath: /run/hvd-elastic/etcd
  readOnly: true
{{- end }}
{{- if $.Values.securityContext.readOnlyRootFilesystem }}
- name: tmp
  mountPath: /tmp
{{- end }}
{{- with concat $.Values.volumeMounts $own.volumeMounts }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{/* The driver's pod. Its Job can't change it, so _checks.tpl refuses an upgrade that would. */}}
{{- define "hvd-elastic.driverPod" -}}
metadata:
  labels:
    {{- include "hvd-elastic.podLabels" (list . "driver" .Values.driver.podLabels) | nindent 4 }}
  {{- with .Values.driver.podAnnotations }}
  annotations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
spec:
  restartPolicy: Never
  serviceAccountName: {{ include "hvd-elastic.serviceAccount" . | quote }}
  automountServiceAccountToken: true
  {{- include "hvd-elastic.podSettings" (list . .Values.driver) | nindent 2 }}
  {{- with .Values.driver.affinity }}
  affinity:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  containers:
    - name: driver
      {{- include "hvd-elastic.containerSettings" . | nindent 6 }}
      command:
        - elasticrun
      args:
        {{- include "hvd-elastic.driverArguments" . | nindent 8 }}
      env:
        - name: POD_IP
          valueFrom:
            fieldRef:
              fieldPath: status.podIP
        - name: POD_NAME
          valueFrom:
            fieldRef:
              fieldPath: metadata.name
        - name: POD_NAMESPACE
          valueFrom:
            fieldRef:
              fieldPath: metadata.namespace
        {{- with include "hvd-elastic.env" . }}
        {{- . | nindent 8 }}
        {{- end }}
      ports:
        - name: agents
          containerPort: 4711
          protocol: TCP
        {{- if .Values.metrics.enabled }}
        - name: metrics
          containerPort: {{ int .Values.metrics.port }}
          protocol: TCP
        {{- end }}
      {{- with include "hvd-elastic.quantities" .Values.driver.resources | fromJson }}
      resources:
        {{- toYaml . | nindent 8 }}
      {{- end }}
      {{- with .Values.securityContext }}
      securityContext:
        {{- toYaml . | nindent 8 }}
      {{- end }}
      volumeMounts:
        {{- if has .Values.journal.kind (list "volume" "emptyDir") }}
        - name: journal
          mountPath: /run/hvd-elastic/journal
        {{- end }}
        {{- include "hvd-elastic.mounts" (list . .Values.driver) | nindent 8 }}
  volumes:
    {{- if eq .Values.journal.kind "volume" }}
    - name: journal
      persistentVolumeClaim:
        claimName: {{ .Values.journal.existingClaim | default (printf "%s-journal" .Release.Name) }}
    {{- else if eq .Values.journal.kind "emptyDir" }}
    - name: journal
      emptyDir: {}
    {{- end }}
    {{- include "hvd-elastic.volumes" (list . .Values.driver) | nindent 4 }}
{{- end }}

{{/* The Job of the driver's pod. */}}
{{- define "hvd-elastic.driverJob" -}}
completions: 1
parallelism: 1
backoffLimit: {{ int .Values.driver.backoffLimit }}
{{- if semverCompare ">=1.26-0" .Capabilities.KubeVersion.Version }}
# 137 and 143: the driver was killed. 75: another driver leads. Any other code is an error of the job.
podFailurePolicy:
  rules:
    - action: Ignore
      onPodConditions:
        - type: DisruptionTarget
          status: "True"
    - action: FailJob
      onPodConditions: [] # required by 1.26 to 1.28
      onExitCodes:
        containerName: driver
        operator: NotIn
        values: [75, 137, 143]
{{- end }}
template:
  {{- include "hvd-elastic.driverPod" . | nindent 2 }}
{{- end }}
