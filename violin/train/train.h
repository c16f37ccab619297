// From a folder of images to trained weights:
//   options.h     what a run can be told, recipes
//   task.h        data, model and options put together
//   trainer.h     the loop, exact resume
//   evaluate.h    accuracy on labelled images
//   schedule.h    learning rates and parameter groups
//   loss.h        losses, metrics, averages of weights
//   run_folder.h  what a run writes
//   distributed.h several processes, over MPI or NCCL
#pragma once

#include "violin/train/distributed.h"
#include "violin/train/evaluate.h"
#include "violin/train/options.h"
#include "violin/train/run_folder.h"
#include "violin/train/task.h"
#include "violin/train/trainer.h"
