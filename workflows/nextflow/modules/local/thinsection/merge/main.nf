process THINSECTION_MERGE {
    label 'process_low'

    conda "${moduleDir}/environment.yml"
    container "${params.thinsection_container}"

    input:
    // results folders of THINSECTION_RUN, all of them
    path(results, stageAs: 'parts/*')

    output:
    path("${prefix}")           , emit: results
    path("${prefix}.merge.json"), emit: summary
    path "versions.yml"         , emit: versions

    when:
    task.ext.when == null || task.ext.when

    script:
    def args = task.ext.args ?: ''
    prefix = task.ext.prefix ?: 'results'
    """
    thinsection merge parts \\
        --out ${prefix} \\
        ${args} \\
        --json > ${prefix}.merge.json

    cat <<-END_VERSIONS > versions.yml
    "${task.process}":
        thinsection: \$(thinsection --version)
    END_VERSIONS
    """

    stub:
    prefix = task.ext.prefix ?: 'results'
    """
    mkdir -p ${prefix}/slides
    touch ${prefix}.merge.json

    cat <<-END_VERSIONS > versions.yml
    "${task.process}":
        thinsection: \$(thinsection --version)
    END_VERSIONS
    """
}
