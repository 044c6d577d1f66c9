// One process for each slide, one results folder, then an AnnData table of all tiles. The two modules
// are in workflows/nextflow/ of the repository.

// --8<-- [start:script]
include { THINSECTION_RUN   } from './modules/local/thinsection/run/main'
include { THINSECTION_MERGE } from './modules/local/thinsection/merge/main'

process ANNDATA {
    input:
    path results

    output:
    path 'tiles.h5ad'

    script:
    """
    thinsection export anndata ${results} --out tiles.h5ad
    """
}

workflow {
    slides = Channel.fromPath('slides/*.svs').map { slide -> [[id: slide.baseName], slide] }
    THINSECTION_RUN(slides)
    THINSECTION_MERGE(THINSECTION_RUN.out.results.map { _meta, folder -> folder }.collect())
    ANNDATA(THINSECTION_MERGE.out.results)
}
// --8<-- [end:script]
