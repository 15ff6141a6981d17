import type { components, operations } from "./schema";

type Schemas = components["schemas"];

export type BlockView = Schemas["BlockView"];
export type BranchView = Schemas["BranchView"];
export type CallLine = Schemas["CallLine"];
export type ErrorAnswer = Schemas["ErrorAnswer"];
export type FunnelStage = Schemas["FunnelStage"];
export type GatewayView = Schemas["GatewayView"];
export type LoopStep = Schemas["LoopStep"];
export type LoopView = Schemas["LoopView"];
export type PairView = Schemas["PairView"];
export type ReportChart = Schemas["ReportChart"];
export type RolloutHead = Schemas["RolloutHead"];
export type RolloutRow = Schemas["RolloutRow"];
export type SegmentView = Schemas["SegmentView"];
export type SessionRow = Schemas["SessionRow"];
export type StateRow = Schemas["StateRow"];
export type StoreChange = Schemas["StoreChange"];
export type StoreHealth = Schemas["StoreHealth"];
export type StoreList = Schemas["StoreList"];
export type StoreSummary = Schemas["StoreSummary"];
export type TaskGroup = Schemas["TaskGroup"];
export type TaskGridRow = Schemas["TaskGridRow"];
export type TaskSample = Schemas["TaskSample"];
export type TokenPage = Schemas["TokenPage"];
export type TurnView = Schemas["TurnView"];
export type VerdictView = Schemas["VerdictView"];
export type VoteRequest = Schemas["VoteRequest"];

export type RolloutFilter = NonNullable<operations["list_rollouts"]["parameters"]["query"]>;

/** What `openapi-fetch` answers with: pairs of numbers are lists of numbers there. */
export type ReportFigures = Omit<Schemas["ReportFigures"], "tasks"> & {
  tasks: { task_id: string; tried: number[][]; turns: number | null }[];
};
export type ReportView = Omit<Schemas["ReportView"], "figures"> & { figures: ReportFigures };
